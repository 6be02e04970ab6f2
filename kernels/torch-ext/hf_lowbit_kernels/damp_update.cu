// One decoding step on packed recurrent states (DAMP) for sm_90. damp_reference.py is the specification.
//
// A block is one (row, value head), a warp one record of 32 columns. The record comes to shared memory and goes back by
// bulk copies: no registers wait for memory, so that many warps fit, and loads and stores cost no instructions.
//
// Sums over rows, S^T k and S^T q, are tensor core products. Of the low rows: int8 codes times key * decay * scale in fixed
// point, 31 bits relative to the largest scale of the record, in four signed bytes; products and sums are exact. Of the high
// rows: fp16 values times key * decay in three fp16 parts, summed in fp32.
//
// The update then takes 16 columns of a row per lane. A row of 8-bit codes is updated in units of its old scale: code +
// (k / scale) delta, one fused multiply-add a value. The new scale and its reciprocal are IEEE quotients, so codes equal
// the reference's wherever sums do.
//
// Nothing in a block depends on the batch: a row alone equals the row in any batch, bit for bit.
//
// Compiled by NVRTC without headers. Macros: DK, TILES (columns / 32), HIGH (protected rows), BITS (8, 4), ZERO_POINT, HEADS
// (value heads), RATIO (value heads per key head), RECORD, LOW_AT, SCALES_AT (bytes), CHANNEL_DECAY, NORMALIZE, INDEX64 and
// the dtypes QK, VALUE, G, BETA (0: fp32, 1: fp16, 2: bf16).

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#define LOW (DK - HIGH)
#define HIGH_BLOCKS ((HIGH + 15) / 16)
#define LOW_BLOCKS ((LOW + 15) / 16)
#define BLOCKS (HIGH_BLOCKS + LOW_BLOCKS)  // of 16 rows; high and low rows are filled up with zeros
#define ROWS (16 * BLOCKS)
#define THREADS (32 * TILES)
#define ROUNDS ((ROWS + THREADS - 1) / THREADS)
#define HIGH_ROUNDS ((8 * HIGH_BLOCKS + 31) / 32)  // pairs of high rows of a lane
#define LOW_ROUNDS ((4 * LOW_BLOCKS + 31) / 32)    // four low rows of a lane
#define WORDS (BITS / 2)                   // 32-bit words of a lane's 16 codes
#define FULL 0xffffffffu
#define FP16_BIG 16384.0f       // 2^14
#define TINY 1e-30f             // a group below this is stored as zeros
#define SMALLEST_SCALE 8e-25f   // a row whose decayed scale is below this counts as zeros: its values are below 1e-22
#define LARGEST 3.402823466e38f
#define MAGIC 12582912.0f       // 1.5 * 2^23: adding it leaves a small number, rounded to nearest even, in the low bits
#define MAGIC_BITS 0x4B400000u
#define NAN_ __uint_as_float(0x7fffffffu)
#define MOST (BITS == 8 ? 127.0f : ZERO_POINT ? 15.0f : 7.0f)
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1
#endif

// Shared memory: the records, with what rows beyond the last one's end read; then each warp's coefficients, later its deltas.
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define RECORD_SPACE (((TILES - 1) * RECORD + LARGER(LOW_AT + 64 * LOW_BLOCKS * BITS, RECORD) + 127) / 128 * 128)
#define HIGH_SPACE (512 * ((HIGH_BLOCKS + 1) / 2))
#define COEFFICIENT_SPACE (HIGH_SPACE + 512 * ((LOW_BLOCKS + 3) / 4))
#define SPACE (RECORD_SPACE + LARGER(TILES * COEFFICIENT_SPACE, 16 * DK))

// Bits of an element; converted apart, so that no load waits for another one's conversion.
template <int TYPE> __device__ __forceinline__ u32 load(const void* p, int i) {
    return TYPE == 0 ? ((const u32*)p)[i] : ((const u16*)p)[i];
}
template <int TYPE> __device__ __forceinline__ float convert(u32 x) {
    if (TYPE == 0) return __uint_as_float(x);
    if (TYPE == 2) return __uint_as_float(x << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)x));
    return f;
}
template <int TYPE> __device__ __forceinline__ void store(void* p, int i, float x) {
    u16 d;
    if (TYPE == 0) { ((float*)p)[i] = x; return; }
    if (TYPE == 1) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
    else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
    ((u16*)p)[i] = d;
}
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 s) { u32 d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s)); return d; }
__device__ __forceinline__ void unpack2(u32 x, float& a, float& b) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
}
__device__ __forceinline__ u32 pack2(float a, float b) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a)); return d; }
// The same, saturated at 65504.
__device__ __forceinline__ u32 pack2_finite(float a, float b) { u32 d; asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a)); return d; }
__device__ __forceinline__ float reciprocal(float x) {  // rounded to nearest, for normal x with a normal reciprocal
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return fmaf(fmaf(-x, y, 1.0f), y, y);
}
__device__ __forceinline__ float quotient(float x, float y) {  // the same for x / y
    const float r = reciprocal(y), q = x * r;
    return fmaf(fmaf(-q, y, x), r, q);
}

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
__device__ __forceinline__ void load_transposed(u32 (&r)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
}
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Signed digits of x, base 256, the lowest first.
__device__ __forceinline__ u32 digits(float x) { return ((u32)__float2int_rn(x) + 0x00808080u) ^ 0x00808080u; }
// Word j of the result: byte j of the four words.
__device__ __forceinline__ void transpose(u32 (&w)[4]) {
    const u32 a = permute(w[0], w[1], 0x5140), b = permute(w[2], w[3], 0x5140), c = permute(w[0], w[1], 0x7362), d = permute(w[2], w[3], 0x7362);
    w[0] = permute(a, b, 0x5410); w[1] = permute(a, b, 0x7632); w[2] = permute(c, d, 0x5410); w[3] = permute(c, d, 0x7632);
}

__device__ __forceinline__ void load_words(u32 (&w)[WORDS], const u8* p) {
#if BITS == 8
    const uint4 v = *(const uint4*)p;
    w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
#else
    const uint2 v = *(const uint2*)p;
    w[0] = v.x; w[1] = v.y;
#endif
}
__device__ __forceinline__ void store_words(u8* p, const u32 (&w)[WORDS]) {
#if BITS == 8
    *(uint4*)p = make_uint4(w[0], w[1], w[2], w[3]);
#else
    *(uint2*)p = make_uint2(w[0], w[1]);
#endif
}
// Codes of a lane's 16 columns as fp32; with 4 bits and no zero point they are 8 too large.
__device__ __forceinline__ void decode(const u32 (&w)[WORDS], float (&x)[16]) {
#if BITS == 8
    // Two ways side by side: conversions are slow, and need no shift for the lowest byte; behind 0x4b0000 a byte is a number.
#pragma unroll
    for (int j = 0; j < 16; j++) {
        if (j % 4 < 2) asm("cvt.rn.f32.s8 %0, %1;" : "=f"(x[j]) : "r"(w[j / 4] >> 8 * (j % 4)));
        else x[j] = __uint_as_float(permute(w[j / 4] ^ 0x80808080u, 0x4b000000u, 0x7440 | j % 4)) - (8388608.0f + 128.0f);
    }
#else
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 word = ZERO_POINT ? w[i] : w[i] ^ 0x88888888u, even = word & 0x0f0f0f0fu, odd = (word >> 4) & 0x0f0f0f0fu;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[8 * i + 2 * j] = (float)(u8)(even >> (8 * j));
            x[8 * i + 2 * j + 1] = (float)(u8)(odd >> (8 * j));
        }
    }
#endif
}
// The inverse, from codes + MAGIC.
__device__ __forceinline__ void encode(const float (&x)[16], u32 (&w)[WORDS]) {
#if BITS == 8
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 a = permute(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]), 0x0040);
        const u32 b = permute(__float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3]), 0x0040);
        w[i] = permute(a, b, 0x5410);
    }
#else
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 sum = 0;
#pragma unroll
        for (int j = 7; j >= 0; j--) sum = 16 * sum + __float_as_uint(x[8 * i + j]);
        // What the magic numbers add up to, and 8 a code: negative codes must not borrow from their neighbours.
        sum -= MAGIC_BITS * 0x11111111u;
        w[i] = ZERO_POINT ? sum : (sum + 0x88888888u) ^ 0x88888888u;
    }
#endif
}

struct Row {  // 16 columns of a low row
    u32 words[WORDS];
    float scale, zero, k, decay;
};
__device__ __forceinline__ Row fetch(const u8* record, const float4* inputs, int row, int half, int block) {
    Row r;
    const u8* const p = record + LOW_AT + (16 * block + row) * (4 * BITS) + half * (2 * BITS);
    const float* const at = (const float*)(record + SCALES_AT) + 16 * block + row;
    const float4 in = inputs[16 * (HIGH_BLOCKS + block) + row];
    const bool is_row = LOW % 16 == 0 || 16 * block + row < LOW;
    r.k = in.x;
    r.decay = in.z;
    r.scale = is_row ? *at : 0.0f;
    r.zero = BITS == 4 && ZERO_POINT && is_row ? at[LOW] : 0.0f;
    load_words(r.words, p);
    return r;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) damp_update(
    u8* __restrict__ records, const void* __restrict__ indices, const void* __restrict__ query, const void* __restrict__ key,
    const void* __restrict__ value, const void* __restrict__ g, const void* __restrict__ beta,
    const u8* __restrict__ perm_k, const short* __restrict__ perm_v, const float* __restrict__ column_scale,
    void* __restrict__ out, i64 slots, i64 slot_bytes, int stride_qb, int stride_qh, int stride_kb, int stride_kh,
    int stride_vb, int stride_vh, int stride_gb, int stride_gh, int stride_bb, int stride_bh, float scale) {
    extern __shared__ __align__(128) u8 space[];
    __shared__ float4 inputs[ROWS];      // of every stored row: k and q, not larger than 1, and decay
    __shared__ float2 values[THREADS];   // of every value channel: v / c, and c
    __shared__ float norms[3][TILES];
    __shared__ u64 arrived;

    const int lane = threadIdx.x & 31, tile = threadIdx.x >> 5;
    const int head = blockIdx.x % HEADS, b = blockIdx.x / HEADS;
    u8* const record = space + tile * RECORD;
    u8* const coefficients = space + RECORD_SPACE + tile * COEFFICIENT_SPACE;
    float4* const channels = (float4*)(space + RECORD_SPACE);  // k, q and decay as they come, before there are coefficients

    // All loads at once, none depends on another: under load each takes a microsecond.
    const i64 slot = INDEX64 ? ((const i64*)indices)[b] : (i64)((const int*)indices)[b];
    const int q_at = b * stride_qb + head / RATIO * stride_qh, k_at = b * stride_kb + head / RATIO * stride_kh;
    const int g_at = b * stride_gb + head * stride_gh;
    u32 k_bits[ROUNDS], q_bits[ROUNDS], g_bits[ROUNDS];
    int from[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int at = i * THREADS + threadIdx.x, key_channel = min(at, DK - 1);
        k_bits[i] = load<QK>(key, k_at + key_channel);
        q_bits[i] = load<QK>(query, q_at + key_channel);
        g_bits[i] = load<G>(g, CHANNEL_DECAY ? g_at + key_channel : g_at);
        const int stored = at < 16 * HIGH_BLOCKS ? at : HIGH + at - 16 * HIGH_BLOCKS;
        const bool is_row = at < 16 * HIGH_BLOCKS ? at < HIGH : stored < DK;
        from[i] = perm_k[head * DK + (is_row ? stored : 0)];
        if (!is_row) from[i] = -1;
    }
    const float column_factor = column_scale[head * THREADS + threadIdx.x];
    const u32 v_bits = load<VALUE>(value, b * stride_vb + head * stride_vh + threadIdx.x);
    // This lane's column of the record, as the sums below come out.
    const int own_column = BITS == 8 ? 16 * (lane & 1) + 2 * (lane >> 2) + (lane >> 1 & 1) : 4 * (lane >> 2) + 2 * (lane & 1) + (lane >> 1 & 1);
    const int channel = perm_v[head * THREADS + 32 * tile + own_column];
    const u32 beta_bits = load<BETA>(beta, b * stride_bb + head * stride_bh);
    const int out_at = (b * HEADS + head) * THREADS + channel;

    const bool absent = slot < 0 || slot >= slots;
    u8* const state = records + slot * slot_bytes + (i64)head * (TILES * RECORD);
    const u32 barrier = address(&arrived);
    if (threadIdx.x == 0 && !absent) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(barrier), "r"(TILES * RECORD) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(address(space)), "l"(state), "r"(TILES * RECORD), "r"(barrier) : "memory");
    }
    if (absent) {
        store<VALUE>(out, out_at, slot < 0 ? 0.0f : NAN_);
        return;
    }

    // Inputs of the rows in stored order, shared by the records of the head.
    float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int at = i * THREADS + threadIdx.x;
        if (DK % THREADS == 0 && i < DK / THREADS || at < DK) {
            const float k = convert<QK>(k_bits[i]), q = convert<QK>(q_bits[i]);
            channels[at] = make_float4(k, q, expf(convert<G>(g_bits[i])), 0.0f);
            kk = fmaf(k, k, kk);
            qq = fmaf(q, q, qq);
            kq = fmaf(k, q, kq);
        }
    }
    values[threadIdx.x] = make_float2(quotient(convert<VALUE>(v_bits), column_factor), column_factor);
#pragma unroll
    for (int m = 16; m; m >>= 1) {
        kk += __shfl_xor_sync(FULL, kk, m);
        qq += __shfl_xor_sync(FULL, qq, m);
        kq += __shfl_xor_sync(FULL, kq, m);
    }
    if (lane == 0) { norms[0][tile] = kk; norms[1][tile] = qq; norms[2][tile] = kq; }
    __syncthreads();
    kk = qq = kq = 0.0f;
#pragma unroll
    for (int i = 0; i < TILES; i++) { kk += norms[0][i]; qq += norms[1][i]; kq += norms[2][i]; }
    // Factors that bring k and q below 1. Without normalisation powers of two, which are undone exactly.
    float k_factor = rsqrtf(kk + 1e-6f), q_factor = rsqrtf(qq + 1e-6f), k_size = 1.0f, out_factor = scale;
    if (!NORMALIZE) {
        k_factor = __uint_as_float(__float_as_uint(k_factor) & 0x7f800000u);
        q_factor = __uint_as_float(__float_as_uint(q_factor) & 0x7f800000u);
        k_size = __uint_as_float(0x7f000000u - __float_as_uint(k_factor));
        out_factor *= __uint_as_float(0x7f000000u - __float_as_uint(q_factor));
    }
    kq *= k_factor * q_factor;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const int at = i * THREADS + threadIdx.x;
        float4 in = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (from[i] >= 0) {
            in = channels[from[i]];
            in.x *= k_factor;
            in.y *= q_factor;
        }
        if (ROWS % THREADS == 0 || at < ROWS) inputs[at] = in;
    }
    __syncthreads();
    {
        u32 done;
        do asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier) : "memory");
        while (!done);
    }

    // Coefficients, as the right-hand matrices of the products have them: for 16 low rows eight rows of 16 bytes, the digits of
    // k, then those of q; the rows of the state in the order in which bytes of codes come (see below). For 8 high rows
    // eight rows of 8 halves: three parts of k, zero, three of q, zero.
    const float* const scales = (const float*)(record + SCALES_AT);
    float row_scale[LOW_ROUNDS + 1][4], k_zero = 0.0f, q_zero = 0.0f;
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < LOW_ROUNDS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int quad = 32 * i + lane, low = quad / 4 * 16 + quad % 4 * 2 + j / 2 * 8 + j % 2;
            row_scale[i][j] = 0.0f;
            if (low < LOW) {
                const float4 in = inputs[16 * HIGH_BLOCKS + low];
                row_scale[i][j] = scales[low] * in.z;
                top = max(top, __float_as_uint(row_scale[i][j]));
#if BITS == 4
                const float z = ZERO_POINT ? scales[LOW + low] * in.z : -8.0f * row_scale[i][j];
                k_zero = fmaf(in.x, z, k_zero);
                q_zero = fmaf(in.y, z, q_zero);
#endif
            }
        }
    }
    asm volatile("redux.sync.max.u32 %0, %0, %1;" : "+r"(top) : "r"(FULL));
    const u32 exponent = top >> 23 & 255, shift = min(283 - exponent, 253u);  // the largest scale becomes 2^29 to 2^30
    const float unit = __uint_as_float(shift << 23);
    // Integers know no NaN and no infinity: those of the scales, of decay and of k come in here.
    const float inverse_unit = exponent == 255 ? NAN_ : __uint_as_float((254 - shift) << 23) + (kk - kk);
#pragma unroll
    for (int i = 0; i < LOW_ROUNDS; i++) {
        const int quad = 32 * i + lane;
        if (quad < 4 * LOW_BLOCKS) {
            u32 k[4], q[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 in = inputs[16 * HIGH_BLOCKS + quad / 4 * 16 + quad % 4 * 2 + j / 2 * 8 + j % 2];
                const float scaled = row_scale[i][j] * unit;
                k[j] = digits(in.x * scaled);
                q[j] = digits(in.y * scaled);
            }
            transpose(k);
            transpose(q);
            u32* const to = (u32*)(coefficients + HIGH_SPACE + quad / 4 * 128) + quad % 4;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                to[4 * j] = k[j];
                to[4 * j + 16] = q[j];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < HIGH_ROUNDS; i++) {
        const int at = 2 * (32 * i + lane);
        if (at < 16 * HIGH_BLOCKS) {
            const float4 x = inputs[at], y = inputs[at + 1];
            u32* const to = (u32*)(coefficients + at / 8 * 128) + at % 8 / 2;
#pragma unroll
            for (int side = 0; side < 2; side++) {
                float a = (side ? x.y : x.x) * (x.z * FP16_BIG), d = (side ? y.y : y.x) * (y.z * FP16_BIG);
#pragma unroll
                for (int j = 0; j < 3; j++) {
                    const u32 rounded = pack2(a, d);
                    float ra, rd;
                    unpack2(rounded, ra, rd);
                    a -= ra;
                    d -= rd;
                    to[16 * side + 4 * j] = rounded;
                }
                to[16 * side + 12] = 0;
            }
        }
    }
    __syncwarp();

    // Entry e of lane 4 j + t: coefficients 2 t + e % 2 times column 16 i + 2 j + e / 2 (8 bits) or 4 j + 2 i + e / 2 (4 bits).
    float sums[2][4];
    int low_sums[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) { sums[i / 4][i % 4] = 0.0f; low_sums[i / 4][i % 4] = 0; }
    u32 c[4];
#pragma unroll
    for (int i = 0; i < LOW_BLOCKS; i += 2) {
        if (i % 4 == 0) load_matrices(c, address(coefficients) + HIGH_SPACE + i / 4 * 512 + 16 * lane);
        u32 codes[2][4];  // [two blocks][parity of the column, then i]: rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (i + n >= LOW_BLOCKS) {
                codes[n][0] = codes[n][1] = codes[n][2] = codes[n][3] = 0;
                continue;
            }
#if BITS == 8
            u32 w[4];  // rows 0-7 and 8-15 of columns 0-15, then of columns 16-31; two columns of a row are neighbours
            load_transposed(w, address(record) + LOW_AT + (16 * (i + n) + (lane & 15)) * 32 + (lane >> 4) * 16);
#pragma unroll
            for (int m = 0; m < 4; m++) codes[n][m] = permute(w[m / 2 * 2], w[m / 2 * 2 + 1], m % 2 ? 0x7531 : 0x6420);
#else
            u32 w[2];  // rows 0-7 and 8-15, four columns of a row are neighbours
            load_transposed(w, address(record) + LOW_AT + (16 * (i + n) + (lane & 15)) * 16);
            if (!ZERO_POINT) { w[0] ^= 0x88888888u; w[1] ^= 0x88888888u; }
#pragma unroll
            for (int m = 0; m < 4; m++)
                codes[n][m] = permute(w[0] >> m % 2 * 4 & 0x0f0f0f0fu, w[1] >> m % 2 * 4 & 0x0f0f0f0fu, m / 2 ? 0x7531 : 0x6420);
#endif
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
            multiply_bytes(low_sums[m], codes[0][2 * m], codes[0][2 * m + 1], codes[1][2 * m], codes[1][2 * m + 1], c[i % 4], c[i % 4 + 1]);
    }
#pragma unroll
    for (int i = 0; i < HIGH_BLOCKS; i++) {
        if (i % 2 == 0) load_matrices(c, address(coefficients) + i / 2 * 512 + 16 * lane);
        u32 w[4][2];  // of four rows: column pairs
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = 16 * i + 2 * (lane & 3) + j / 2 * 8 + j % 2;
            w[j][0] = w[j][1] = 0;
            if (HIGH % 16 == 0 || row < HIGH) {
                const u8* const p = record + row * 64 + (lane >> 2) * (BITS == 8 ? 4 : 8);
                w[j][0] = *(const u32*)p;
                w[j][1] = *(const u32*)(p + (BITS == 8 ? 32 : 4));
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
            multiply(sums[n], permute(w[0][n], w[1][n], 0x5410), permute(w[0][n], w[1][n], 0x7632),
                     permute(w[2][n], w[3][n], 0x5410), permute(w[2][n], w[3][n], 0x7632), c[i % 2 * 2], c[i % 2 * 2 + 1]);
    }
    // Lanes t = 0 and 1 hold S^T k, 2 and 3 S^T q. Each gets both of one column: i = t % 2, e / 2 = t / 2.
    float predicted, read;
    {
        const bool odd = lane & 1, upper = lane & 2;
        float x[2][2], y[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int low_sum = low_sums[i / 2][i % 2 * 2] + 256 * low_sums[i / 2][i % 2 * 2 + 1];
            const float high_sum = sums[i / 2][i % 2 * 2] + sums[i / 2][i % 2 * 2 + 1];
            x[i / 2][i % 2] = fmaf((float)low_sum, odd ? inverse_unit * 65536.0f : inverse_unit, high_sum * (1.0f / FP16_BIG));
        }
#pragma unroll
        for (int i = 0; i < 2; i++) y[i] = (odd ? x[1][i] : x[0][i]) + __shfl_xor_sync(FULL, odd ? x[0][i] : x[1][i], 1);
        const float kept = upper ? y[1] : y[0], received = __shfl_xor_sync(FULL, upper ? y[0] : y[1], 2);
        predicted = upper ? received : kept;
        read = upper ? kept : received;
    }
#if BITS == 4
#pragma unroll
    for (int m = 16; m; m >>= 1) {
        k_zero += __shfl_xor_sync(FULL, k_zero, m);
        q_zero += __shfl_xor_sync(FULL, q_zero, m);
    }
    predicted += k_zero;
    read += q_zero;
#endif
    const float2 own_value = values[channel];
    float own = (own_value.x - predicted * k_size) * (convert<BETA>(beta_bits) * k_size);
    store<VALUE>(out, out_at, fmaf(own, kq, read) * out_factor * own_value.y);

    // A NaN or an infinity anywhere in a column of the state, in k, v, g or beta is in the column's delta too, so that no
    // element needs a check. Left out: sums beyond 3e38 of finite terms, which overflow below.
    if (!(fabsf(own) <= LARGEST)) own = NAN_;
    const bool poisoned = __any_sync(FULL, own != own);
    float* const deltas = (float*)coefficients;  // all lanes have passed the shuffles, so nobody reads coefficients any more
    deltas[own_column] = own;
    __syncwarp();
    const int half = lane & 1, row = lane >> 1;
    float delta[16];
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
        const float4 d = *(const float4*)(deltas + 16 * half + j);
        delta[j] = d.x; delta[j + 1] = d.y; delta[j + 2] = d.z; delta[j + 3] = d.w;
    }

    // Update and encode in place: 16 columns of the rows row, row + 16, ...
#pragma unroll
    for (int i = 0; i < HIGH_BLOCKS; i++) {
        if (HIGH % 16 == 0 || 16 * i + row < HIGH) {
            const float4 in = inputs[16 * i + row];
            uint4* const p = (uint4*)(record + (16 * i + row) * 64 + half * 32);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint4 w = p[n];
                u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float x, y;
                    unpack2(words[j], x, y);
                    words[j] = pack2_finite(fmaf(in.x, delta[8 * n + 2 * j], x * in.z), fmaf(in.x, delta[8 * n + 2 * j + 1], y * in.z));
                }
                p[n] = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
    Row next = fetch(record, inputs, row, half, 0);
#pragma unroll
    for (int i = 0; i < LOW_BLOCKS; i++) {
        Row now = next;
        if (i + 1 < LOW_BLOCKS) next = fetch(record, inputs, row, half, i + 1);  // before the stores, which loads do not pass
        float x[16], size, s = now.scale * now.decay;
#if BITS == 8
        if (!(s >= SMALLEST_SCALE)) {
            s = 1.0f;
            now.words[0] = now.words[1] = now.words[2] = now.words[3] = 0;
        }
        decode(now.words, x);
        const float k = now.k * reciprocal(s);
        float most[4];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            x[j] = fmaf(k, delta[j], x[j]);
            most[j % 4] = j < 4 ? fabsf(x[j]) : fmaxf(most[j % 4], fabsf(x[j]));
        }
        size = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
        size = fmaxf(size, __shfl_xor_sync(FULL, size, 1)) * s;
#else
        decode(now.words, x);
        const float z = ZERO_POINT ? now.zero * now.decay : -8.0f * s;
        float most[4], least[4];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            x[j] = fmaf(now.k, delta[j], fmaf(x[j], s, z));
            if (!ZERO_POINT) most[j % 4] = j < 4 ? fabsf(x[j]) : fmaxf(most[j % 4], fabsf(x[j]));
            else if (j < 4) most[j] = least[j] = x[j];
            else {
                most[j % 4] = fmaxf(most[j % 4], x[j]);
                least[j % 4] = fminf(least[j % 4], x[j]);
            }
        }
        size = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
        size = fmaxf(size, __shfl_xor_sync(FULL, size, 1));
#if ZERO_POINT
        float zero = fminf(fminf(least[0], least[1]), fminf(least[2], least[3]));
        zero = fminf(zero, __shfl_xor_sync(FULL, zero, 1)) + 0.0f;  // + 0: no negative zero
        size -= zero;
#endif
        s = 1.0f;
#endif
        // size / MOST: one correction makes the product with the reciprocal the IEEE quotient.
        float new_scale = size * (1.0f / MOST);
        new_scale = fmaf(fmaf(new_scale, -MOST, size), 1.0f / MOST, new_scale);
        float inverse = reciprocal(new_scale) * s;
        if (size < TINY) new_scale = inverse = 0.0f;
        if (poisoned) new_scale = NAN_;
#pragma unroll
        for (int j = 0; j < 16; j++) {
#if BITS == 4 && ZERO_POINT
            x[j] -= zero;
#endif
            x[j] = fmaf(x[j], inverse, MAGIC);  // no clamp: the limit is exceeded by rounding errors only
        }
        encode(x, now.words);
        if (LOW % 16 == 0 || 16 * i + row < LOW) {
            store_words(record + LOW_AT + (16 * i + row) * (4 * BITS) + half * (2 * BITS), now.words);
            if (half == 0) {
                float* const at = (float*)(record + SCALES_AT) + 16 * i + row;
                *at = new_scale;
#if BITS == 4 && ZERO_POINT
                at[LOW] = poisoned ? NAN_ : zero;
#endif
            }
        }
    }
    if (poisoned && LOW_BLOCKS) {  // its codes are zeros
        __syncwarp();
        for (int i = lane; i < LOW * BITS; i += 32) ((u32*)(record + LOW_AT))[i] = 0;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(state + tile * RECORD), "r"(address(record)), "r"(RECORD) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}
