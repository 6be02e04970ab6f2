// Decode attention over vector-quantized keys and values for sm_90, head_dim 128, one query head per kv head.
//
// Why CUDA and not Triton: the gathers must be free of shared-memory bank conflicts, and Triton cannot say which lane
// looks up which group. Here a lane owns a group (c = 4: 32 lanes, one token; c = 8: 16 lanes, one token in each half
// warp). Both tables of a head are staged once per block as [256 entries][groups][c]: entry e of group g lies at byte
// 256 e + 2 c g, so the bank follows from the lane alone, and any 32 codes are looked up without a conflict. One byte
// permute of a word of codes makes that offset.
//
// Scores: the query is rotated back to the middle of a span of tokens in fp32 (a constant angle from span to span) and
// from there to each token in packed fp16; tokens at equal distance from the middle share a product. Products of query
// and key are packed fp16, their sum over the lanes is fp32 on the tensor cores (a product with ones). Values: packed
// fp16 within a span, fp32 from span to span. The softmax reference is raised only when a score exceeds it by 2^4.
//
// Order of sums: a row's pages are cut into slices, one for each team of 4 warps of the blocks (split, head), and a slice
// into four parts or two (see PARTS). The warps of a team share the slices of a row that holds more than a quarter of all
// tokens, a part each; other rows they take in turn, one after another all parts of a slice, so that starting and ending
// a row is paid for once. Parts, then slices, are merged in a fixed order, whoever computed them: a row alone equals the
// row in any batch, bit for bit.
//
// Compiled by NVRTC without headers. Macros: CHANNELS (c: 4 or 8), HALF_INPUT (1: fp16 query and window, 0: bf16).

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#define C CHANNELS
#define DIM 128
#define HALF 64
#define GROUPS (DIM / C)      // lanes that hold one token: 32 or 16
#define SUBS (32 / GROUPS)    // tokens in a warp at a time: 1 or 2
#define SPAN (16 / SUBS)      // neighbouring tokens of one lane: 16 (two pages) or 8 (one page; the half warps hold two)
#define MIRRORS (SPAN / 2)    // pairs of tokens at equal distance from the middle of a span
#define SPARE (SUBS == 1 ? 4 : 2)  // lanes that differ in this bit hold the same score
#define PAIRS (C / 2)         // packed pairs per entry
#define TABLE 65536           // bytes of one table
#ifndef TEAMS
#define TEAMS 4
#endif
#define TEAM 4                // warps
#define WARPS (TEAMS * TEAM)
#define PARTIAL 132           // floats: 128 outputs, maximum, sum, two unused
#define NONE -1.0e30f         // finite: a warp without tokens gives exp2(0) * 0 and not NaN
// Parts of a slice: few for rows whose parts would be too short to start each, four where a single row must keep all warps
// busy: short rows (latency is all that counts) and long ones.
#define PARTS(coded) ((coded) >= 3072 && (coded) < 7168 ? 2 : TEAM)
#define QUAD (4 / SUBS)       // full-precision tokens of a lane at a time: a warp takes four neighbours
#define HEADROOM 4.0f         // log2: weights stay below 2^4, far from the limits of fp16

#define BUFFERS 4             // rows whose warps' partials may be under way at once
#define DEPTH 4               // spans of codes on their way to shared memory
#define SPAN_BYTES (64 * SPAN)  // codes of a warp's span: keys, then values
#define MERGE_BYTES (BUFFERS * WARPS * PARTIAL * 4)
#define WEIGHT_BYTES (WARPS * 32)
#define QUERY_BYTES (WARPS * 32 * 4 * C)
#define RING_BYTES (WARPS * DEPTH * SPAN_BYTES)
#define FLAG_BYTES (2 * TEAMS * BUFFERS * 4)
#define SMEM_BYTES (2 * TABLE + RING_BYTES + MERGE_BYTES + QUERY_BYTES + WEIGHT_BYTES + FLAG_BYTES + 16)

__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
__device__ __forceinline__ u32 pack2(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ float half_bits(u16 x) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f; }
__device__ __forceinline__ float low(u32 x) { return half_bits((u16)(x & 0xffff)); }
__device__ __forceinline__ float high(u32 x) { return half_bits((u16)(x >> 16)); }
__device__ __forceinline__ float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 s) { u32 d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(s)); return d; }
__device__ __forceinline__ float xor_add(float x, int m) { return x + __shfl_xor_sync(0xffffffffu, x, m); }
__device__ __forceinline__ float xor_max(float x, int m) { return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m)); }

// Model dtype (query, window, output) to and from fp32.
__device__ __forceinline__ float from_model(u16 x) {
#if HALF_INPUT
    return half_bits(x);
#else
    return __uint_as_float((u32)x << 16);
#endif
}
__device__ __forceinline__ u16 to_model(float x) {
    u16 d;
#if HALF_INPUT
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
#endif
    return d;
}

// d += a b, b of fp16 zeros and ones: sums packed products over groups of four lanes; see the scores below.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 splat_low(u32 x) { u32 d; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(x)); return d; }
__device__ __forceinline__ u32 splat_high(u32 x) { u32 d; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(x)); return d; }
__device__ __forceinline__ u32 negate2(u32 x) { return x ^ 0x80008000u; }

// fp32 loads of C neighbouring values.
__device__ __forceinline__ void load_row(float (&x)[C], const float* p) {
#pragma unroll
    for (int e = 0; e < C; e += 4) {
        float4 f = *(const float4*)(p + e);
        x[e] = f.x; x[e + 1] = f.y; x[e + 2] = f.z; x[e + 3] = f.w;
    }
}

struct Softmax {  // of one warp
    float maximum;  // log2 units
    float sum;      // this lane's tokens only
    float acc[C];   // this lane's channels
};

// top: the largest score of this lane.
__device__ __forceinline__ void raise_maximum(Softmax& s, float top) {
    if (__any_sync(0xffffffffu, top > s.maximum + HEADROOM)) {
        top = xor_max(xor_max(xor_max(xor_max(xor_max(top, 1), 2), 4), 8), 16);
        float decay = exp2_(s.maximum - top);
        s.sum *= decay;
#pragma unroll
        for (int e = 0; e < C; e++) s.acc[e] *= decay;
        s.maximum = top;
    }
}

// Pages [begin, end) of a slice: equal shares of whole spans.
__device__ __forceinline__ int slice_share(int coded, int slices) { return (((coded >> 3) + slices - 1) / slices + 1) & ~1; }
__device__ __forceinline__ int slice_begin(int coded, int slice, int slices) { return slice * slice_share(coded, slices); }
__device__ __forceinline__ int slice_end(int coded, int slice, int slices) {
    return min((slice + 1) * slice_share(coded, slices), coded >> 3);
}

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }

// Slot of the i-th full-precision token.
__device__ __forceinline__ int window_slot(int i, int coded, int sinks, int ring) {
    return i < sinks ? i : sinks + (i + coded - sinks) % ring;
}

// Copies of a warp to shared memory, ahead of their use. Every lane reads only what it has copied itself, so that
// waiting for its own copies is enough. Copies are committed in groups; past the end of a row groups are empty.
struct Stream {
    u32 codes, query;               // this lane's places in the ring of spans (keys) and for its query
    const u8 *kc, *vc;              // codes of this head and lane's group in the row
    int begin, end;                 // pages of the slice
    int page, part, last;           // of the next span to copy; the warp's last part
    int step;                       // pages from one span of a part to the next

    __device__ __forceinline__ void copy8(u32 to, const void* from) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(to), "l"(from) : "memory");
    }
    // Pages of a part: begin + 2 part, its neighbour, and so on every 2 PARTS pages.
    __device__ __forceinline__ void skip_empty_parts() {
        while (page >= end && part < last) page = begin + 2 * ++part;
    }
    // Span `n` of the warp in this row: all of its parts, one after another.
    __device__ __forceinline__ void span(int n, int sub, u32 stride_kcp, u32 stride_vcp) {
        if (page < end) {
            const u32 page0 = min(page + sub, end - 1), at = codes + n % DEPTH * SPAN_BYTES;
            copy8(at, kc + (u64)page0 * stride_kcp);
            copy8(at + 32 * SPAN, vc + (u64)page0 * stride_vcp);
#if SUBS == 1
            const u32 page1 = min(page + 1, end - 1);  // a lonely last page is its own partner, unused
            copy8(at + 8, kc + (u64)page1 * stride_kcp);
            copy8(at + 32 * SPAN + 8, vc + (u64)page1 * stride_vcp);
#endif
            page += step;
            skip_empty_parts();
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    // The oldest group but DEPTH - 1 has arrived.
    __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory"); }
    __device__ __forceinline__ void read(u32 (&k)[SPAN / 4], u32 (&v)[SPAN / 4], int n) {
        const u32 at = codes + n % DEPTH * SPAN_BYTES;
#if SUBS == 1
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(k[0]), "=r"(k[1]), "=r"(k[2]), "=r"(k[3]) : "r"(at) : "memory");
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at + 32 * SPAN) : "memory");
#else
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(k[0]), "=r"(k[1]) : "r"(at) : "memory");
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(at + 32 * SPAN) : "memory");
#endif
    }
    // own: the channels of this lane; other: their RoPE partners, signed so that one formula rotates both halves.
    __device__ __forceinline__ void read_query(float (&own)[C], float (&other)[C], float scale, bool second) {
#pragma unroll
        for (int e = 0; e < PAIRS; e++) {
            u32 a, b;
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(query + 4 * e) : "memory");
            asm volatile("ld.shared.b32 %0, [%1];" : "=r"(b) : "r"(query + 2 * C + 4 * e) : "memory");
            own[2 * e] = scale * from_model(a & 0xffff);
            own[2 * e + 1] = scale * from_model(a >> 16);
            other[2 * e] = (second ? -scale : scale) * from_model(b & 0xffff);
            other[2 * e + 1] = (second ? -scale : scale) * from_model(b >> 16);
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) vq_decode_attention(
    const u16* __restrict__ query, const u8* __restrict__ k_codes, const u8* __restrict__ v_codes,
    const u8* __restrict__ k_table, const u8* __restrict__ v_table,
    const u16* __restrict__ k_window, const u16* __restrict__ v_window,
    const int* __restrict__ lengths, const int* __restrict__ n_coded,
    const float* __restrict__ base_cos, const float* __restrict__ base_sin,      // [rows, 64], 8 positions a row
    const float* __restrict__ offset_cos, const float* __restrict__ offset_sin,  // [128, 64]
    const float* __restrict__ mirror_cos, const float* __restrict__ mirror_sin,  // [8, 64], distances 0.5, 1.5, ...
    const u32* __restrict__ mirror_half,                                         // the same as fp16 [2, 8, 64]
    float* scratch, int* counters, u16* out,
    float scale, int batch, int sinks, int ring,
    i64 stride_qb, i64 stride_qh, i64 stride_kcb, u32 stride_kcp, i64 stride_vcb, u32 stride_vcp,
    i64 stride_kwb, i64 stride_kwh, i64 stride_kws, i64 stride_vwb, i64 stride_vwh, i64 stride_vws)
{
    extern __shared__ __align__(1024) u8 smem[];
    const u32 barrier = (u32)__cvta_generic_to_shared(smem + SMEM_BYTES - 16);

    const int head = blockIdx.y, heads = gridDim.y;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int team = warp / TEAM, member = warp % TEAM;
    const int slice = blockIdx.x * TEAMS + team, slices = gridDim.x * TEAMS;
    const int group = lane % GROUPS, sub = lane / GROUPS;
    const int channel = group * C, in_half = channel % HALF;
    const bool second = channel >= HALF;
    float* merge = (float*)(smem + 2 * TABLE + RING_BYTES) + team * TEAM * PARTIAL;  // buffer i: + i * WARPS * PARTIAL
    u8* weights = smem + 2 * TABLE + RING_BYTES + MERGE_BYTES + QUERY_BYTES + warp * 32;  // fp16 [16]
    // Of the team, by buffer: warps that have written their partials, and rows that have been merged.
    volatile int* written = (volatile int*)(smem + SMEM_BYTES - 16 - FLAG_BYTES) + team * BUFFERS;
    volatile int* merged = written + TEAMS * BUFFERS;

    // Both tables into shared memory by bulk copies, one barrier each.
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier + 8));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
        for (int side = 0; side < 2; side++) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier + 8 * side), "r"(TABLE) : "memory");
            const u8* from = (side ? v_table : k_table) + (i64)head * TABLE;
            u32 to = (u32)__cvta_generic_to_shared(smem + side * TABLE);
            for (int part = 0; part < TABLE; part += TABLE / 4)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             :: "r"(to + part), "l"(from + part), "r"(TABLE / 4), "r"(barrier + 8 * side) : "memory");
        }
    }

    // Rotations of this lane's channels from the middle of a span to its tokens.
    u32 cosine[MIRRORS][PAIRS], sine[MIRRORS][PAIRS];
#pragma unroll
    for (int s = 0; s < MIRRORS; s++) {
#pragma unroll
        for (int e = 0; e < PAIRS; e += 2) {
            uint2 c2 = *(const uint2*)(mirror_half + (s * HALF + in_half) / 2 + e);
            uint2 s2 = *(const uint2*)(mirror_half + ((8 + s) * HALF + in_half) / 2 + e);
            cosine[s][e] = c2.x; cosine[s][e + 1] = c2.y;
            sine[s][e] = s2.x; sine[s][e + 1] = s2.y;
        }
    }
    float step_cos[C], step_sin[C];  // rotation from one span of a part to the next
    int step = 0;

    // Column n of the sums is token n (and n + 8; with c = 8: n % 4 and n % 4 + 4) of the span.
    u32 ones[SPAN / 2];
#pragma unroll
    for (int n = 0; n < SPAN / 2; n++) {
        u32 bits = (lane >> 2) % (SPAN / 2) == n ? 0x3c003c00u : 0u;
        asm volatile("mov.b32 %0, %1;" : "=r"(ones[n]) : "r"(bits));  // kept: the compiler would compute it every time
    }

    // Where this lane's weight goes: its token within the span (or in the second page's half).
#if SUBS == 1
    const int weight_offset = 2 * (2 * (lane & 3) + (lane >> 3 & 1) + 8 * (lane >> 4));
#else
    const int weight_offset = 2 * (2 * (lane & 1) + (lane >> 2 & 1) + 4 * (lane >> 3 & 1) + 8 * sub);
#endif
    const u32 lane_base = group * (2 * C);  // bytes 1 to 3 are zero
    if (threadIdx.x < 2 * TEAMS * BUFFERS) ((int*)(smem + SMEM_BYTES - 16 - FLAG_BYTES))[threadIdx.x] = 0;
    __syncthreads();  // barriers and flags are initialized
    int quarter = 0;  // of all coded tokens; of fewer than four rows all are shared
    if (batch >= TEAM) {
        for (int i = lane; i < batch; i += 32) quarter += n_coded[i];
        quarter = __reduce_add_sync(0xffffffffu, quarter) / TEAM;
    }
    // Lengths of 32 rows at a time, one in each lane.
    int block = -1, block_coded = 0, block_length = 0, coded = 0, length = 0;
    bool shared = false;  // by the team
    // The first row from `row` on that this warp has a part in.
    auto find_row = [&](int row) {
        for (; row < batch; row++) {
            if (row >> 5 != block) {
                block = row >> 5;
                const int at = min(32 * block + lane, batch - 1);
                block_coded = n_coded[at];
                block_length = lengths[at];
            }
            coded = __shfl_sync(0xffffffffu, block_coded, row & 31);
            length = __shfl_sync(0xffffffffu, block_length, row & 31);
            shared = coded > quarter;
            if (shared || row % TEAM == member) break;
        }
        return row;
    };
    Stream stream;
    stream.codes = (u32)__cvta_generic_to_shared(smem + 2 * TABLE) + warp * (DEPTH * SPAN_BYTES) + lane * SPAN;
    stream.query = (u32)__cvta_generic_to_shared(smem + 2 * TABLE + RING_BYTES + MERGE_BYTES) + threadIdx.x * (4 * C);
    // Query and first codes of a row set out while the row before is still being finished.
    auto start_row = [&](int row) {
        const i64 inner = head * (8 * GROUPS) + group * 8;
        stream.kc = k_codes + row * stride_kcb + inner;
        stream.vc = v_codes + row * stride_vcb + inner;
        stream.begin = slice_begin(coded, slice, slices);
        stream.end = slice_end(coded, slice, slices);
        stream.part = shared ? member : 0;
        stream.last = shared ? member : PARTS(coded) - 1;
        stream.step = 2 * PARTS(coded);
        stream.page = stream.part < PARTS(coded) ? stream.begin + 2 * stream.part : stream.end;
        stream.skip_empty_parts();
        const u16* q = query + row * stride_qb + head * stride_qh;
#pragma unroll
        for (int e = 0; e < C; e += 4) {
            stream.copy8(stream.query + 2 * e, q + channel + e);
            stream.copy8(stream.query + 2 * C + 2 * e, q + (channel ^ HALF) + e);
        }
#pragma unroll
        for (int n = 0; n < DEPTH; n++) stream.span(n, sub, stride_kcp, stride_vcp);
    };
    int row = find_row(0), merges = 0;
    if (row < batch) start_row(row);
    bool staged = false;

    while (row < batch) {
        stream.wait();
        const bool together = shared;
        const int begin = stream.begin, end = stream.end, finished = row, parts = PARTS(coded);
        if (step != stream.step) {
            step = stream.step;
            load_row(step_cos, offset_cos + 8 * step * HALF + in_half);
            load_row(step_sin, offset_sin + 8 * step * HALF + in_half);
        }
        int n = 0;
        // Of a shared row in fewer parts than warps, the last warps have empty ones.
        for (int part = together ? member : 0; part < (together ? TEAM : parts); part++) {
        Softmax state;
        state.maximum = NONE;
        state.sum = 0.0f;
#pragma unroll
        for (int e = 0; e < C; e++) state.acc[e] = 0.0f;

        // Full-precision tokens go to the parts of the row in turn; on their way to L2 while the codes are attended to.
        const int window_tokens = min(length, sinks) + max(length - sinks - coded, 0);
        const int window_first = part < parts ? 4 * (slice + slices * (parts - 1 - part)) : window_tokens;
        const int window_step = 4 * slices * parts;
        if (window_first + lane / 8 < window_tokens) {
            const i64 slot = window_slot(window_first + lane / 8, coded, sinks, ring);
            const u16* const from = lane & 4 ? v_window + row * stride_vwb + head * stride_vwh + slot * stride_vws
                                             : k_window + row * stride_kwb + head * stride_kwh + slot * stride_kws;
            prefetch(from + (lane & 1) * 64);
        }

        // A lane's tokens: pages `page` and `page + 1` (c = 4), or page `page + sub` alone (c = 8).
        const int first = part < parts ? begin + 2 * part : end;
        if (first < end) {
            float u[C], w[C];
            {
                float c1[C], s1[C], c2[C], s2[C];
                load_row(c1, base_cos + (i64)(first + sub + (sinks >> 3)) * HALF + in_half);
                load_row(s1, base_sin + (i64)(first + sub + (sinks >> 3)) * HALF + in_half);
                float own[C], other[C];
                stream.read_query(own, other, scale, second);
                // On to the middle: the last distance.
                load_row(c2, mirror_cos + (MIRRORS - 1) * HALF + in_half);
                load_row(s2, mirror_sin + (MIRRORS - 1) * HALF + in_half);
#pragma unroll
                for (int e = 0; e < C; e++) {
                    float u0 = own[e] * c1[e] + other[e] * s1[e], w0 = other[e] * c1[e] - own[e] * s1[e];
                    u[e] = u0 * c2[e] + w0 * s2[e];
                    w[e] = w0 * c2[e] - u0 * s2[e];
                }
            }
            if (!staged) {
                staged = true;
#pragma unroll
                for (int side = 0; side < 2; side++)
                    asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@p bra done;\nbra wait;\ndone:\n}"
                                 :: "r"(barrier + 8 * side) : "memory");
            }

            for (int page = first; page < end; page += step, n++) {
                u32 k_word[SPAN / 4], v_word[SPAN / 4];
                stream.wait();
                stream.read(k_word, v_word, n);
                u32 uh[PAIRS], wh[PAIRS];
#pragma unroll
                for (int e = 0; e < PAIRS; e++) {
                    uh[e] = pack2(u[2 * e], u[2 * e + 1]);
                    wh[e] = pack2(w[2 * e], w[2 * e + 1]);
                }
                u32 product[SPAN];
#pragma unroll
                for (int s = 0; s < MIRRORS; s++) {
                    const int before = MIRRORS - 1 - s, after = MIRRORS + s;  // tokens of the span
                    u32 k[2][PAIRS];
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        const int i = side ? after : before;
                        const u8* entry = smem + permute(k_word[i / 4], lane_base, 0x5504 | (i % 4) << 4);
#if C == 4
                        uint2 k2 = *(const uint2*)entry; k[side][0] = k2.x; k[side][1] = k2.y;
#else
                        uint4 k4 = *(const uint4*)entry;
                        k[side][0] = k4.x; k[side][1] = k4.y; k[side][2] = k4.z; k[side][3] = k4.w;
#endif
                    }
                    u32 p0 = 0, p1 = 0;
#pragma unroll
                    for (int e = 0; e < PAIRS; e++) {
                        u32 c = mul2(uh[e], cosine[s][e]);
                        u32 x0 = fma2(negate2(wh[e]), sine[s][e], c), x1 = fma2(wh[e], sine[s][e], c);
                        p0 = e == 0 ? mul2(k[0][e], x0) : fma2(k[0][e], x0, p0);
                        p1 = e == 0 ? mul2(k[1][e], x1) : fma2(k[1][e], x1, p1);
                    }
                    product[before] = p0;
                    product[after] = p1;
                }
                const bool alone = page + 1 >= end;
                stream.span(n + DEPTH, sub, stride_kcp, stride_vcp);
#pragma unroll
                for (int e = 0; e < C; e++) {
                    float u1 = u[e] * step_cos[e] + w[e] * step_sin[e];
                    w[e] = w[e] * step_cos[e] - u[e] * step_sin[e];
                    u[e] = u1;
                }
                // Row r of d: the products of lanes 4 r to 4 r + 3. Columns n and rows r + 8: see `ones`.
                float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int j = 0; j < SPAN / 4; j++)
                    mma(d, product[2 * j], product[2 * j + SPAN / 2], product[2 * j + 1], product[2 * j + 1 + SPAN / 2],
                        ones[2 * j], ones[2 * j + 1]);
                // Sum over the rows; every hop leaves a lane with half of its tokens.
                bool upper = lane & (16 / SUBS);
                float x0 = (upper ? d[2] : d[0]) + __shfl_xor_sync(0xffffffffu, upper ? d[0] : d[2], 16 / SUBS);
                float x1 = (upper ? d[3] : d[1]) + __shfl_xor_sync(0xffffffffu, upper ? d[1] : d[3], 16 / SUBS);
                bool odd = lane & (8 / SUBS);
                float score = (odd ? x1 : x0) + __shfl_xor_sync(0xffffffffu, odd ? x0 : x1, 8 / SUBS);
#if SUBS == 1
                score = xor_add(score, 4);
                score = alone && upper ? NONE : score;
#else
                score = alone && sub ? NONE : score;
#endif
                raise_maximum(state, score);
                float weight = exp2_(score - state.maximum);
                state.sum += weight;
                if (!(lane & SPARE))
                    *(u16*)(weights + weight_offset) = (u16)pack2(weight, weight);
                __syncwarp();
                u32 weight2[SPAN / 2];
#pragma unroll
                for (int i = 0; i < SPAN / 8; i++) {
                    uint4 x = *(const uint4*)(weights + 16 * (i + sub));
                    weight2[4 * i] = x.x; weight2[4 * i + 1] = x.y; weight2[4 * i + 2] = x.z; weight2[4 * i + 3] = x.w;
                }
                u32 sums[PAIRS];
#pragma unroll
                for (int i = 0; i < SPAN; i++) {
                    const u8* entry = smem + TABLE + permute(v_word[i / 4], lane_base, 0x5504 | (i % 4) << 4);
                    u32 v[PAIRS];
#if C == 4
                    uint2 v2 = *(const uint2*)entry; v[0] = v2.x; v[1] = v2.y;
#else
                    uint4 v4 = *(const uint4*)entry; v[0] = v4.x; v[1] = v4.y; v[2] = v4.z; v[3] = v4.w;
#endif
                    u32 wt = i % 2 ? splat_high(weight2[i / 2]) : splat_low(weight2[i / 2]);
#pragma unroll
                    for (int e = 0; e < PAIRS; e++) sums[e] = i == 0 ? mul2(v[e], wt) : fma2(v[e], wt, sums[e]);
                }
                __syncwarp();  // the weights are read before the next ones are written
#pragma unroll
                for (int e = 0; e < PAIRS; e++) {
                    state.acc[2 * e] += low(sums[e]);
                    state.acc[2 * e + 1] += high(sums[e]);
                }
            }
        }
        float sum = xor_add(xor_add(xor_add(state.sum, 1), SUBS == 1 ? 2 : 4), 8);
        sum = xor_add(sum, 16);

        // Full-precision tokens in fp32, four neighbours of one page at a time (with c = 8 two in each half warp): sinks
        // first, then the positions from sinks + coded on.
        for (int i = window_first; i < window_tokens; i += window_step) {
            u32 k_bits[QUAD][PAIRS], v_bits[QUAD][PAIRS];
#pragma unroll
            for (int t = 0; t < QUAD; t++) {
                const int token = min(i + QUAD * sub + t, window_tokens - 1);
                const i64 slot = window_slot(token, coded, sinks, ring);
                const u16* const k = k_window + row * stride_kwb + head * stride_kwh + slot * stride_kws + channel;
                const u16* const v = v_window + row * stride_vwb + head * stride_vwh + slot * stride_vws + channel;
#pragma unroll
                for (int e = 0; e < PAIRS; e += 2) {
                    const uint2 k2 = *(const uint2*)(k + 2 * e), v2 = *(const uint2*)(v + 2 * e);
                    k_bits[t][e] = k2.x; k_bits[t][e + 1] = k2.y;
                    v_bits[t][e] = v2.x; v_bits[t][e + 1] = v2.y;
                }
            }
            const int position = i < sinks ? i : i + coded;
            float u[C], w[C];
            {
                float c1[C], s1[C], own[C], other[C];
                load_row(c1, base_cos + (i64)(position >> 3) * HALF + in_half);
                load_row(s1, base_sin + (i64)(position >> 3) * HALF + in_half);
                stream.read_query(own, other, scale, second);
#pragma unroll
                for (int e = 0; e < C; e++) {
                    u[e] = own[e] * c1[e] + other[e] * s1[e];
                    w[e] = other[e] * c1[e] - own[e] * s1[e];
                }
            }
            float score[QUAD], top = NONE;
#pragma unroll
            for (int t = 0; t < QUAD; t++) {
                float c2[C], s2[C];
                const int offset = ((position & 7) + QUAD * sub + t) * HALF + in_half;
                load_row(c2, offset_cos + offset);
                load_row(s2, offset_sin + offset);
                score[t] = 0.0f;
#pragma unroll
                for (int e = 0; e < C; e++) {
                    const u16 k = e % 2 ? k_bits[t][e / 2] >> 16 : k_bits[t][e / 2] & 0xffff;
                    score[t] += from_model(k) * (u[e] * c2[e] + w[e] * s2[e]);
                }
            }
#pragma unroll
            for (int t = 0; t < QUAD; t++) {
#pragma unroll
                for (int hop = GROUPS / 2; hop > 0; hop >>= 1) score[t] = xor_add(score[t], hop);
                if (i + QUAD * sub + t >= window_tokens) score[t] = NONE;
                top = fmaxf(top, score[t]);
            }
            if (SUBS == 2) top = xor_max(top, 16);
            if (top > state.maximum) {  // the same for the whole warp
                const float decay = exp2_(state.maximum - top);
                sum *= decay;
#pragma unroll
                for (int e = 0; e < C; e++) state.acc[e] *= decay;
                state.maximum = top;
            }
            float added = 0.0f;
#pragma unroll
            for (int t = 0; t < QUAD; t++) {
                const float weight = exp2_(score[t] - state.maximum);  // of no token: 0, as the first of the four exists
                added += weight;
#pragma unroll
                for (int e = 0; e < C; e++) {
                    const u16 v = e % 2 ? v_bits[t][e / 2] >> 16 : v_bits[t][e / 2] & 0xffff;
                    state.acc[e] += weight * from_model(v);
                }
            }
            sum += SUBS == 2 ? xor_add(added, 16) : added;
        }

        // The next row sets out before this one is finished.
        if (together || part == parts - 1) {
            row = find_row(row + 1);
            if (row < batch) start_row(row);
        }

#if SUBS == 2
#pragma unroll
        for (int e = 0; e < C; e++) state.acc[e] = xor_add(state.acc[e], 16);
#endif
        // The partial goes to buffer `merges` of the team or, of a row that is the warp's own, to its place in buffer `part`.
        float* const to = merge + (together ? merges % BUFFERS : part) * WARPS * PARTIAL + member * PARTIAL;
        // Rows that used the buffers before must have been merged; hardly ever waits.
        if (together) while (merged[merges % BUFFERS] < merges / BUFFERS) {}
        else if (part == 0) for (int i = 0; i < BUFFERS; i++) while (merged[i] < (merges + BUFFERS - 1 - i) / BUFFERS) {}
        if (sub == 0) {
#pragma unroll
            for (int e = 0; e < C; e += 4)
                *(float4*)(to + channel + e) = make_float4(state.acc[e], state.acc[e + 1], state.acc[e + 2], state.acc[e + 3]);
        }
        if (lane == 0) { to[DIM] = state.maximum; to[DIM + 1] = sum; }
        if (together) break;
        }

        // Parts are merged into a slice by the team's last warp, or by the row's own; nobody waits.
        const float* from = merge + member * PARTIAL;
        int stride = WARPS * PARTIAL;
        if (together) {
            from = merge + merges % BUFFERS * WARPS * PARTIAL;
            stride = PARTIAL;
            merges++;
            __threadfence_block();
            __syncwarp();
            int before = 0;
            if (lane == 0) before = atomicAdd((int*)written + (merges - 1) % BUFFERS, 1);
            if (__shfl_sync(0xffffffffu, before, 0) != (merges - 1) / BUFFERS * TEAM + TEAM - 1) continue;
            __threadfence_block();
        }
        __syncwarp();
        float top = NONE, sum = 0.0f;
        float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < TEAM; i++) top = fmaxf(top, i < parts ? from[i * stride + DIM] : NONE);
#pragma unroll
        for (int i = 0; i < TEAM; i++) {
            if (i >= parts) break;
            const float f = exp2_(from[i * stride + DIM] - top);
            const float4 a = *(const float4*)(from + i * stride + 4 * lane);
            sum += f * from[i * stride + DIM + 1];
            acc.x += f * a.x; acc.y += f * a.y; acc.z += f * a.z; acc.w += f * a.w;
        }
        const i64 here = (i64)finished * heads + head;
        float* const to = scratch + (here * slices + slice) * PARTIAL;
        *(float4*)(to + 4 * lane) = acc;
        if (lane == 0) { to[DIM] = top; to[DIM + 1] = sum; }
        __syncwarp();
        if (together) {
            __threadfence();
            __syncwarp();
            if (lane == 0) { merged[(merges - 1) % BUFFERS] = (merges - 1) / BUFFERS + 1; atomicAdd(counters + here, 1); }
        }
    }
    // The warp's own rows are made known together: a fence takes as long as some tokens.
    __threadfence();
    __syncwarp();
    for (int i = member + TEAM * lane; i < batch; i += 32 * TEAM)
        if (n_coded[i] <= quarter) atomicAdd(counters + (i64)i * heads + head, 1);

    // Every slice of a row is written when its counter says so; the row's turn goes to one warp of the head. All blocks
    // are resident (the caller launches at most one per multiprocessor), so waiting ends.
    for (int row = slice + slices * member; row < batch; row += slices * TEAM) {
        const i64 here = (i64)row * heads + head;
        if (lane == 0) {
            int arrived;
            do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counters + here) : "memory");
            while (arrived < slices);
            counters[here] = 0;
        }
        __syncwarp();
        const float* from = scratch + here * slices * PARTIAL;
        float top = NONE, total = 0.0f;
        float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int i = lane; i < slices; i += 32) top = fmaxf(top, __ldcg(from + i * PARTIAL + DIM));
        top = xor_max(xor_max(xor_max(xor_max(xor_max(top, 1), 2), 4), 8), 16);
#pragma unroll 8
        for (int i = 0; i < slices; i++) {
            float f = exp2_(__ldcg(from + i * PARTIAL + DIM) - top);
            float4 a = __ldcg((const float4*)(from + i * PARTIAL + 4 * lane));
            total += f * __ldcg(from + i * PARTIAL + DIM + 1);
            acc.x += f * a.x; acc.y += f * a.y; acc.z += f * a.z; acc.w += f * a.w;
        }
        float inverse = total > 0.0f ? 1.0f / total : 0.0f;  // a row of length 0 gives zeros
        uint2 packed;
        packed.x = (u32)to_model(acc.x * inverse) | (u32)to_model(acc.y * inverse) << 16;
        packed.y = (u32)to_model(acc.z * inverse) | (u32)to_model(acc.w * inverse) << 16;
        *(uint2*)(out + here * DIM + 4 * lane) = packed;
    }
}
