// Pages of codes to keys after RoPE, and values, for sm_90, head_dim 128.
//
// A block stages one head's table of keys or of values once, as [256 entries][groups][c]. A lane owns a group (c = 4: 32
// lanes hold a token; c = 8: 16 lanes, and the half warps hold the first and the last four tokens of a page): entry e of
// group g lies at byte 256 e + 2 c g, so the bank follows from the lane alone and look-ups never conflict. One byte permute
// of a word of codes makes that offset. A warp takes every WARPS-th page of the block's; codes of its next page are on
// their way while it works on one.
//
// Roundings are those of PyTorch: entries round to the model's dtype, then either product, then their sum. Packed
// instructions round once where PyTorch computes in fp32 and rounds again. That is the same: products of two such numbers
// are exact in fp32, and fp32 has 24 >= 2 p + 2 bits (p: 8 of bf16, 11 of fp16), so rounding a sum twice is harmless.
//
// Compiled by NVRTC without headers. Macros: CHANNELS (c: 4 or 8), HALF_STATES (1: fp16 keys, values and angles, 0: bf16).

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define C CHANNELS
#define DIM 128
#define GROUPS (DIM / C)      // lanes that hold one token: 32 or 16
#define SUBS (32 / GROUPS)    // tokens in a warp at a time: 1 or 2
#define STEPS (8 / SUBS)      // tokens of a page that a lane holds, neighbours
#define WORDS (STEPS / 4)     // words of codes of them
#define PAIRS (C / 2)         // packed pairs per entry
#define TABLE 65536           // bytes of one table
#define WARPS 16

#if HALF_STATES
#define PAIR "f16x2"
#else
#define PAIR "bf16x2"
#endif

// Explicit rounding: never fused.
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 add2(u32 a, u32 b) { u32 d; asm("add.rn." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 s) { u32 d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s)); return d; }
// A packed pair of the table, fp16, in the model's dtype.
__device__ __forceinline__ u32 to_model(u32 x) {
#if HALF_STATES
    return x;
#else
    float lo, hi;
    u32 d;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(lo), "=f"(hi) : "r"(x));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
#endif
}

struct Entry { u32 pair[PAIRS]; };

__device__ __forceinline__ Entry load(const void* from) {
    Entry x;
#if C == 4
    const uint2 f = *(const uint2*)from;
    x.pair[0] = f.x; x.pair[1] = f.y;
#else
    const uint4 f = *(const uint4*)from;
    x.pair[0] = f.x; x.pair[1] = f.y; x.pair[2] = f.z; x.pair[3] = f.w;
#endif
    return x;
}
__device__ __forceinline__ Entry load_constant(const u16* from) {
    Entry x;
#if C == 4
    asm("ld.global.nc.v2.b32 {%0,%1}, [%2];" : "=r"(x.pair[0]), "=r"(x.pair[1]) : "l"(from));
#else
    asm("ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];"
        : "=r"(x.pair[0]), "=r"(x.pair[1]), "=r"(x.pair[2]), "=r"(x.pair[3]) : "l"(from));
#endif
    return x;
}
__device__ __forceinline__ void store(u16* to, const Entry& x) {
#if C == 4
    *(uint2*)to = make_uint2(x.pair[0], x.pair[1]);
#else
    *(uint4*)to = make_uint4(x.pair[0], x.pair[1], x.pair[2], x.pair[3]);
#endif
}

struct Codes { u32 word[WORDS]; };  // of this lane's tokens

__device__ __forceinline__ Codes load_codes(const u8* from) {
    Codes x;
#if C == 4
    asm("ld.global.nc.v2.b32 {%0,%1}, [%2];" : "=r"(x.word[0]), "=r"(x.word[1]) : "l"(from));
#else
    asm("ld.global.nc.b32 %0, [%1];" : "=r"(x.word[0]) : "l"(from));
#endif
    return x;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) vq_decode_pages(
    const u8* __restrict__ k_codes, const u8* __restrict__ v_codes,
    const u8* __restrict__ k_table, const u8* __restrict__ v_table,
    const u16* __restrict__ cos, const u16* __restrict__ sin,  // [B or 1, 8 pages, 128]
    u16* __restrict__ keys, u16* __restrict__ values,          // [B, H, 8 pages, 128], tokens contiguous
    int pages, int share,                                      // share: pages of a block
    i64 stride_cb, i64 stride_cp, i64 stride_ch,               // codes: keys and values alike
    i64 stride_ab, i64 stride_sb, i64 stride_sh)               // angles by row; keys and values by row and head
{
    extern __shared__ __align__(1024) u8 smem[];
    const u32 barrier = (u32)__cvta_generic_to_shared(smem + TABLE);
    const int row = blockIdx.z, head = blockIdx.y >> 1, lane = threadIdx.x & 31;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);  // a warp does not diverge, and the compiler knows
    const bool is_values = blockIdx.y & 1;
    const int group = lane % GROUPS, sub = lane / GROUPS;

    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(TABLE) : "memory");
        const u8* from = (is_values ? v_table : k_table) + (i64)head * TABLE;
        const u32 to = (u32)__cvta_generic_to_shared(smem);
        for (int part = 0; part < TABLE; part += TABLE / 4)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         :: "r"(to + part), "l"(from + part), "r"(TABLE / 4), "r"(barrier) : "memory");
    }
    const int end = min((int)(blockIdx.x + 1) * share, pages);
    int page = blockIdx.x * share + warp;
    const i64 code_step = stride_cp * WARPS;
    const u8* codes = (is_values ? v_codes : k_codes) + row * stride_cb + head * stride_ch + page * stride_cp
                      + 8 * group + 4 * WORDS * sub;
    Codes next = {};
    if (page < end) next = load_codes(codes);
    __syncthreads();  // the barrier is initialized
    asm volatile("{\n.reg .pred p;\nWAIT:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@!p bra WAIT;\n}" :: "r"(barrier) : "memory");

    const u32 lane_base = 2 * C * group;
    auto lookup = [&](const Codes& now, int i) {  // of this lane's token i
        Entry x = load(smem + permute(now.word[i / 4], lane_base, 0x5504 | i % 4 << 4));
#pragma unroll
        for (int e = 0; e < PAIRS; e++) x.pair[e] = to_model(x.pair[e]);
        return x;
    };
    const i64 token = 8ll * page + STEPS * sub;  // of this lane's first one
    u16* to = (is_values ? values : keys) + row * stride_sb + head * stride_sh + token * DIM + C * group;
    if (is_values) {
        for (; page < end; page += WARPS, to += 8 * WARPS * DIM) {
            const Codes now = next;
            codes += code_step;
            if (page + WARPS < end) next = load_codes(codes);
#pragma unroll
            for (int i = 0; i < STEPS; i++) store(to + i * DIM, lookup(now, i));
        }
        return;
    }
    // The other half of the head lies half of a token's lanes away. First half: a cos - b sin; second half: b cos + a sin.
    const u32 sign = group < GROUPS / 2 ? 0x80008000u : 0;
    const i64 angle = row * stride_ab + token * DIM + C * group;
    const u16 *cos_at = cos + angle, *sin_at = sin + angle;
    for (; page < end; page += WARPS, to += 8 * WARPS * DIM, cos_at += 8 * WARPS * DIM, sin_at += 8 * WARPS * DIM) {
        const Codes now = next;
        codes += code_step;
        if (page + WARPS < end) next = load_codes(codes);
        Entry c[STEPS], s[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            c[i] = load_constant(cos_at + i * DIM);
            s[i] = load_constant(sin_at + i * DIM);
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const Entry x = lookup(now, i);
            Entry turned;
#pragma unroll
            for (int e = 0; e < PAIRS; e++) {
                const u32 other = __shfl_xor_sync(0xffffffffu, x.pair[e], GROUPS / 2) ^ sign;
                turned.pair[e] = add2(mul2(x.pair[e], c[i].pair[e]), mul2(other, s[i].pair[e]));
            }
            store(to + i * DIM, turned);
        }
    }
}
