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
// Schedule: each warp copies its items (a span of codes, or two full-precision tokens) through a ring of its own in shared
// memory, DEPTH ahead, on across parts and rows, so that it hardly ever waits for memory. A row's full-precision tokens come
// first, while the tables are on their way. Values of a span are summed while the scores of the next one are reduced.
//
// Order of sums: a row's pages are cut into slices, one for each team of 4 warps of the blocks (split, head), and a slice
// into four parts or two (see PARTS). A row that holds more than a quarter of all coded tokens (any row, of fewer than four)
// is shared: each warp of a team takes a part of the slice. The other rows go to the warps in turn; one warp then takes all
// parts of the slice, one after another, so that starting and ending a row is paid for once. Parts, then slices, are merged
// in a fixed order, whoever computed them: a row alone equals the row in any batch, bit for bit.
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
#define SLICE 132             // floats of a slice in global memory: 128 outputs, maximum, sum, two unused
#define PARTIAL (32 * C + 36) // floats of a part in shared memory: outputs and sums by lane, maximum, three unused
#define NONE -1.0e30f         // finite: a warp without tokens gives exp2(0) * 0 and not NaN
// Parts of a slice: few for rows whose parts would be too short to start each, four where a single row must keep all warps
// busy: short rows (latency is all that counts) and long ones.
#define PARTS(coded) ((coded) >= 3072 && (coded) < 7168 ? 1 : 2)  // log2
#define HEADROOM 4.0f         // log2: weights stay below 2^4, far from the limits of fp16

#define MERGE 24              // slices of a row that are merged at a time
#define BUFFERS 2             // shared rows whose parts may be under way at once
#ifndef DEPTH
#define DEPTH 3               // items on their way to shared memory
#endif
// A slot holds an item: codes of a span (keys, then values), or two full-precision tokens (keys, then values); behind them
// what a row's or part's first item brings along.
#define ANGLES 1024           // fp32 [2, 64]: cosines and sines at the item's first position
#define QUERY 1536            // [128]
#define HEADER 1792           // int [8]: row, coded tokens, full-precision tokens, items of them; spans, of a part, lonely, shared
#define SLOT 1824
#define RING_AT (2 * TABLE)
#define MERGE_AT (RING_AT + WARPS * DEPTH * SLOT)
#define OFFSET_AT (MERGE_AT + TEAMS * BUFFERS * TEAM * PARTIAL * 4)
#define OFFSETS 11            // rows of cosines, then of sines: distances 0 to 7, middle of a span, 8, 16
#define WEIGHT_AT (OFFSET_AT + 2 * OFFSETS * HALF * 4)
#define FLAG_AT (WEIGHT_AT + WARPS * 64)
#define SMEM_BYTES ((FLAG_AT + 2 * TEAMS * BUFFERS * 4 + 15) / 16 * 16 + 16)

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
    __device__ __forceinline__ void clear() {
        maximum = NONE;
        sum = 0.0f;
#pragma unroll
        for (int e = 0; e < C; e++) acc[e] = 0.0f;
    }
    // The same roundings wherever it is inlined: whoever merges parts gets the same bits.
    __device__ __forceinline__ void merge(const Softmax& s) {
        const float top = fmaxf(maximum, s.maximum), f = exp2_(maximum - top), g = exp2_(s.maximum - top);
        maximum = top;
        sum = __fmaf_rn(sum, f, __fmul_rn(s.sum, g));
#pragma unroll
        for (int e = 0; e < C; e++) acc[e] = __fmaf_rn(acc[e], f, __fmul_rn(s.acc[e], g));
    }
    // top: the largest new score of this lane.
    __device__ __forceinline__ void raise(float top) {
        if (__any_sync(0xffffffffu, top > maximum + HEADROOM)) {
            top = xor_max(xor_max(xor_max(xor_max(xor_max(top, 1), 2), 4), 8), 16);
            const float decay = exp2_(maximum - top);
            sum *= decay;
#pragma unroll
            for (int e = 0; e < C; e++) acc[e] *= decay;
            maximum = top;
        }
    }
};

__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ int4 load4i(u32 at) {
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ void store4i(u32 at, int x, int y, int z, int w) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" :: "r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ uint2 load2(u32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory");
    return x;
}
// C neighbouring fp32 values in shared memory.
__device__ __forceinline__ void load_shared(float (&x)[C], u32 at) {
#pragma unroll
    for (int e = 0; e < C; e += 4) {
        const int4 f = load4i(at + 4 * e);
        x[e] = __int_as_float(f.x); x[e + 1] = __int_as_float(f.y);
        x[e + 2] = __int_as_float(f.z); x[e + 3] = __int_as_float(f.w);
    }
}
// C neighbouring packed 16-bit values in shared memory.
__device__ __forceinline__ void load_packed(u32 (&x)[PAIRS], u32 at) {
#pragma unroll
    for (int e = 0; e < PAIRS; e += 2) {
        const uint2 f = load2(at + 4 * e);
        x[e] = f.x; x[e + 1] = f.y;
    }
}

// Entry of this lane's group: code i of a word.
__device__ __forceinline__ void lookup(u32 (&entry)[PAIRS], const u8* table, u32 word, u32 lane_base, int i) {
    const u8* from = table + permute(word, lane_base, 0x5504 | i << 4);
#if C == 4
    const uint2 x = *(const uint2*)from;
    entry[0] = x.x; entry[1] = x.y;
#else
    const uint4 x = *(const uint4*)from;
    entry[0] = x.x; entry[1] = x.y; entry[2] = x.z; entry[3] = x.w;
#endif
}
// What a warp does of a row.
struct Job {
    int coded, tokens;   // tokens: in full precision
    int page, end;       // pages [page, end) of the slice
    int first, last;     // spans [first, last) of the slice
    int part;            // spans of a part
    int turn;            // slot of a recent token, but for one turn of the ring: its number + turn
    int items;           // of the row's full-precision tokens, two each; the slice has every slices-th of them
    bool shared;         // a part for each warp of the team
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
    float scale, int batch, int sinks, int ring,  // strides of codes and window: of keys and values alike
    i64 stride_qb, i64 stride_qh,
    i64 stride_cb, u32 stride_cp, i64 stride_wb, i64 stride_wh, i64 stride_ws)
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
    float* const merge = (float*)(smem + MERGE_AT) + team * (BUFFERS * TEAM * PARTIAL);  // [buffer][member][PARTIAL]
    u32 weights = (u32)__cvta_generic_to_shared(smem + WEIGHT_AT) + warp * 64;  // fp16 [16], twice: read and written in turn
    const u32 offsets = (u32)__cvta_generic_to_shared(smem + OFFSET_AT) + 4 * in_half;  // cos, then sin, [OFFSETS, 64] each
    const u32 ring_begin = (u32)__cvta_generic_to_shared(smem + RING_AT) + warp * (DEPTH * SLOT);
    // Of the team, by buffer: warps that have written their partials, and rows that have been merged.
    volatile int* const written = (volatile int*)(smem + FLAG_AT) + team * BUFFERS;
    volatile int* const merged = written + TEAMS * BUFFERS;

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
    if (threadIdx.x < 2 * TEAMS * BUFFERS) ((int*)(smem + FLAG_AT))[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < 2 * OFFSETS * HALF / 4; i += WARPS * 32) {  // arrive with the warp's first item
        const int distance = i % (OFFSETS * HALF / 4) / (HALF / 4), at = i % (HALF / 4) * 4;
        const bool sines = i >= OFFSETS * HALF / 4;
        const float* from = distance == 8 ? (sines ? mirror_sin : mirror_cos) + (MIRRORS - 1) * HALF
                                          : (sines ? offset_sin : offset_cos) + (distance < 8 ? distance : distance == 9 ? 8 : 16) * HALF;
        copy16((u32)__cvta_generic_to_shared(smem + OFFSET_AT) + 16 * i, from + at);
    }
    // What the kernel before this one wrote is read from here on; see dependent_launch.py.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int quarter = 0;       // of all coded tokens; of fewer than four rows all are shared
    bool any_shared = true;
    if (batch >= TEAM) {
        int most = 0;
        for (int i = lane; i < batch; i += 32) { quarter += n_coded[i]; most = max(most, n_coded[i]); }
        quarter = __reduce_add_sync(0xffffffffu, quarter) / TEAM;
        any_shared = (int)__reduce_max_sync(0xffffffffu, (u32)most) > quarter;
    }

    // x * reciprocal >> 32 is x / slices, exactly, while x * slices < 2^32.
    const u32 reciprocal = 0xffffffffu / (u32)slices + 1;
    // ---- copies to shared memory, DEPTH items ahead. An item: a span of codes, or two full-precision tokens, or nothing.
    auto job_of = [&](int row) {
        Job job;
        job.coded = n_coded[row];
        const int length = lengths[row], pages = job.coded >> 3;
        const int share = ((int)__umulhi(pages + slices - 1, reciprocal) + 1) & ~1, shift = PARTS(job.coded);  // whole spans
        job.page = min(slice * share, pages);
        job.end = min(job.page + share, pages);
        const int spans = (job.end - job.page + 1) >> 1;
        job.part = (spans + (1 << shift) - 1) >> shift;
        job.shared = job.coded > quarter;
        job.first = job.shared ? min(member * job.part, spans) : 0;
        job.last = job.shared ? min(job.first + job.part, spans) : spans;
        job.tokens = min(length, sinks) + max(length - sinks - job.coded, 0);
        job.turn = job.coded % ring;
        job.items = job.shared && member > 0 ? 0 : (job.tokens + 1) >> 1;
        return job;
    };
    // The first row from `row` on that this warp has a part in.
    auto find_row = [&](int row) {
        if (!any_shared) return row + ((member - row) & (TEAM - 1));
        while (row < batch && n_coded[row] <= quarter && row % TEAM != member) row++;
        return row;
    };
    int ahead_row = find_row(0), ahead_item = -1, ahead_span = 0, ahead_part = 0;  // ahead_item < 0: the row's first item
    int ahead_fast = 0;            // spans that follow one another
    const u8* ahead_codes = k_codes;  // this lane's 16 bytes of the next span
    auto copy_codes = [&](u32 slot, const u8* from) {
#if SUBS == 1
        copy16(slot + 16 * lane, from);
        copy16(slot + 512 + 16 * lane, from + (v_codes - k_codes));
#else
        copy16(slot + 16 * lane, from);
#endif
    };
    // This lane's 16 bytes of the span that begins at `page`. A lonely last page is its own partner, unused.
    auto codes_at = [&](int row, int page, int end) {
        const int mine = min(page + (SUBS == 1 ? lane >> 4 : lane >> 3 & 1), end - 1);
        const u8* from = SUBS == 2 && lane >= 16 ? v_codes : k_codes;
        return from + row * stride_cb + (u64)(u32)mine * stride_cp + head * (8 * GROUPS) + (SUBS == 1 ? lane & 15 : lane & 7) * 16;
    };
    auto copy_angles = [&](u32 slot, int position) {
        const float* from = (lane < 16 ? base_cos : base_sin) + (i64)(position >> 3) * HALF + 4 * (lane & 15);
        copy16(slot + ANGLES + 16 * lane, from);
    };
    Job job;
    if (ahead_row < batch) job = job_of(ahead_row);
    auto copy_rare = [&](u32 slot) {
        if (ahead_row < batch && ahead_item >= job.items && ahead_span >= job.last) {
            ahead_row = find_row(ahead_row + 1);
            ahead_item = -1;
            if (ahead_row < batch) job = job_of(ahead_row);
        }
        if (ahead_row >= batch) {
            if (lane == 0) store4i(slot + HEADER, batch, 0, 0, 0);
            return;
        }
        if (ahead_item < 0) {
            ahead_item = slice;
            ahead_span = ahead_part = job.first;
            // A lonely page is in the last span of the slice.
            const int lonely = (job.end - job.page) % 2 && job.last * 2 > job.end - job.page ? job.last - 1 - job.first : -1;
            if (lane == 0) {
                store4i(slot + HEADER, ahead_row, job.coded, job.tokens, job.items);
                store4i(slot + HEADER + 16, job.last - job.first, job.part, lonely, job.shared);
            }
            if (lane < 16) copy16(slot + QUERY + 16 * lane, query + ahead_row * stride_qb + head * stride_qh + 8 * lane);
        }
        if (ahead_item < job.items) {
            const int token = min(2 * ahead_item + (lane >> 4), job.tokens - 1);
            int at = token + (token < sinks ? 0 : job.turn);
            if (at >= sinks + ring) at -= ring;
            const u16* from = k_window + ahead_row * stride_wb + head * stride_wh + (i64)at * stride_ws + 8 * (lane & 15);
            copy16(slot + 16 * lane, from);
            copy16(slot + 512 + 16 * lane, from + (v_window - k_window));
            copy_angles(slot, 2 * ahead_item < sinks ? 2 * ahead_item : 2 * ahead_item + job.coded);
            ahead_item += slices;
        } else if (ahead_span < job.last) {
            const int page = job.page + 2 * ahead_span;
            copy_codes(slot, codes_at(ahead_row, page, job.end));
            if (ahead_span == ahead_part) {
                copy_angles(slot, 8 * page + sinks);
                ahead_part += job.part;
            }
            ahead_span++;
            const int next = min(ahead_part, job.last);
            // Up to the next part, or to a lonely page.
            ahead_fast = max(next - ahead_span - (2 * next > job.end - job.page), 0);
            ahead_codes = codes_at(ahead_row, page + 2, job.end);
            ahead_span += ahead_fast;
        }
    };
    auto copy_next = [&](u32 slot) {
        if (ahead_fast > 0) {
            copy_codes(slot, ahead_codes);
            ahead_codes += 2 * (u64)stride_cp;
            ahead_fast--;
        } else {
            copy_rare(slot);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) copy_next(ring_begin + i * SLOT);
    u32 slot = ring_begin;
    // On to the next item, which has arrived then, as own copies and everybody's; this one has been read by all lanes.
    auto advance = [&]() {
        asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
        __syncwarp();
        copy_next(slot);
        slot += SLOT;
        if (slot == ring_begin + DEPTH * SLOT) slot = ring_begin;
    };
    asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory");

    // Rotations from the middle of a span to its tokens.
    u32 cosines[MIRRORS][PAIRS], sines[MIRRORS][PAIRS];
#pragma unroll
    for (int s = 0; s < MIRRORS; s++) {
#pragma unroll
        for (int e = 0; e < PAIRS; e += 2) {
            uint2 x = *(const uint2*)(mirror_half + (s * HALF + in_half) / 2 + e);
            cosines[s][e] = x.x; cosines[s][e + 1] = x.y;
            x = *(const uint2*)(mirror_half + ((8 + s) * HALF + in_half) / 2 + e);
            sines[s][e] = x.x; sines[s][e + 1] = x.y;
        }
    }
#if C == 8
    float step_cos[C], step_sin[C];  // rotation to the next span; for c = 4 no registers are left
    load_row(step_cos, offset_cos + 16 * HALF + in_half);
    load_row(step_sin, offset_sin + 16 * HALF + in_half);
#endif
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
    __syncthreads();  // barriers, flags and offsets are there
    int merges = 0;
    bool staged = false, own = false;

    for (;;) {
        const int4 header = load4i(slot + HEADER), plan = load4i(slot + HEADER + 16);
        const int row = header.x, count = plan.x;
        if (row >= batch) break;
        u32 q_own[PAIRS], q_other[PAIRS];
        load_packed(q_own, slot + QUERY + 2 * channel);
        load_packed(q_other, slot + QUERY + 2 * (channel ^ HALF));
        // The query at the angle whose cosines and sines lie in the slot: u, and its quarter turn w.
        auto rotate_query = [&](float (&u)[C], float (&w)[C]) {
            float c1[C], s1[C];
            load_shared(c1, slot + ANGLES + 4 * in_half);
            load_shared(s1, slot + ANGLES + 4 * HALF + 4 * in_half);
#pragma unroll
            for (int e = 0; e < C; e++) {
                const float own = scale * from_model(e % 2 ? q_own[e / 2] >> 16 : q_own[e / 2] & 0xffff);
                // RoPE partners, signed so that one formula rotates both halves.
                const float other = (second ? -scale : scale) * from_model(e % 2 ? q_other[e / 2] >> 16 : q_other[e / 2] & 0xffff);
                u[e] = own * c1[e] + other * s1[e];
                w[e] = other * c1[e] - own * s1[e];
            }
        };
        Softmax total;
        total.clear();

        // Full-precision tokens in fp32, two neighbours of one page at a time (with c = 8 one in each half warp): sinks
        // first, then the positions from sinks + coded on. They come first: the tables are still on their way.
        if (slice >= header.w && count == 0) advance();
#pragma unroll 1
        for (int item = slice; item < header.w; item += slices) {
            float u[C], w[C], score[2 / SUBS], top = NONE;
            rotate_query(u, w);
            u32 v_bits[2 / SUBS][PAIRS];
#pragma unroll
            for (int t = 0; t < 2 / SUBS; t++) {
                const int token = t + sub;
                float c2[C], s2[C];
                const u32 offset = offsets + (((2 * item) & 7) + token) * (4 * HALF);
                load_shared(c2, offset);
                load_shared(s2, offset + OFFSETS * 4 * HALF);
                u32 k_bits[PAIRS];
                load_packed(k_bits, slot + 256 * token + 2 * channel);
                load_packed(v_bits[t], slot + 512 + 256 * token + 2 * channel);
                score[t] = 0.0f;
#pragma unroll
                for (int e = 0; e < C; e++) {
                    const u16 k = e % 2 ? k_bits[e / 2] >> 16 : k_bits[e / 2] & 0xffff;
                    score[t] += from_model(k) * (u[e] * c2[e] + w[e] * s2[e]);
                }
            }
#pragma unroll
            for (int t = 0; t < 2 / SUBS; t++) {
#pragma unroll
                for (int hop = GROUPS / 2; hop > 0; hop >>= 1) score[t] = xor_add(score[t], hop);
                if (2 * item + t + sub >= header.z) score[t] = NONE;
                top = fmaxf(top, score[t]);
            }
            if (SUBS == 2) top = xor_max(top, 16);
            top = fmaxf(top, total.maximum);
            const float decay = exp2_(total.maximum - top);
            total.maximum = top;
            total.sum *= decay;
#pragma unroll
            for (int e = 0; e < C; e++) total.acc[e] *= decay;
#pragma unroll
            for (int t = 0; t < 2 / SUBS; t++) {
                const float weight = exp2_(score[t] - top);
                if ((lane & (GROUPS - 1) & ~SPARE) == 0) total.sum += weight;
#pragma unroll
                for (int e = 0; e < C; e++) {
                    const u16 v = e % 2 ? v_bits[t][e / 2] >> 16 : v_bits[t][e / 2] & 0xffff;
                    total.acc[e] += weight * from_model(v);
                }
            }
            advance();
        }

        if (!staged && count > 0) {
            staged = true;
#pragma unroll
            for (int side = 0; side < 2; side++)
                asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@p bra done;\nbra wait;\ndone:\n}"
                             :: "r"(barrier + 8 * side) : "memory");
        }
#pragma unroll 1
        for (int done = 0; done < count;) {
            const int stop = min(done + plan.y, count);
            Softmax state;
            state.clear();
            float u[C], w[C];
            {
                float c2[C], s2[C], u0[C], w0[C];
                rotate_query(u0, w0);
                // On to the middle: the last distance.
                load_shared(c2, offsets + 8 * 4 * HALF);
                load_shared(s2, offsets + (OFFSETS + 8) * 4 * HALF);
#if SUBS == 2
                // The second half warp is a page further on.
                if (sub) {
                    float c8[C], s8[C];
                    load_shared(c8, offsets + 9 * 4 * HALF);
                    load_shared(s8, offsets + (OFFSETS + 9) * 4 * HALF);
#pragma unroll
                    for (int e = 0; e < C; e++) {
                        const float u1 = u0[e] * c8[e] + w0[e] * s8[e];
                        w0[e] = w0[e] * c8[e] - u0[e] * s8[e];
                        u0[e] = u1;
                    }
                }
#endif
#pragma unroll
                for (int e = 0; e < C; e++) {
                    u[e] = u0[e] * c2[e] + w0[e] * s2[e];
                    w[e] = w0[e] * c2[e] - u0[e] * s2[e];
                }
            }
            u32 v_word[SPAN / 4];  // codes of the values whose weights are known
            auto values = [&]() {
                u32 weight2[SPAN / 2];
#pragma unroll
                for (int i = 0; i < SPAN / 8; i++) {
                    const int4 x = load4i(weights + 16 * (i + sub));
                    weight2[4 * i] = x.x; weight2[4 * i + 1] = x.y; weight2[4 * i + 2] = x.z; weight2[4 * i + 3] = x.w;
                }
                u32 sums[PAIRS];
#pragma unroll
                for (int i = 0; i < SPAN; i++) {
                    u32 v[PAIRS];
                    lookup(v, smem + TABLE, v_word[i / 4], lane_base, i % 4);
                    u32 wt = i % 2 ? splat_high(weight2[i / 2]) : splat_low(weight2[i / 2]);
#pragma unroll
                    for (int e = 0; e < PAIRS; e++) sums[e] = i == 0 ? mul2(v[e], wt) : fma2(v[e], wt, sums[e]);
                }
#pragma unroll
                for (int e = 0; e < PAIRS; e++) {
                    state.acc[2 * e] += low(sums[e]);
                    state.acc[2 * e + 1] += high(sums[e]);
                }
            };
            // Products with the keys of the slot's span; the values of the span before meanwhile, if there is one.
            auto span = [&](bool pipelined) __attribute__((always_inline)) {
                u32 k_word[SPAN / 4], v_next[SPAN / 4];
#if SUBS == 1
#pragma unroll
                for (int page = 0; page < 2; page++) {
                    const uint2 k = load2(slot + 256 * page + 8 * group), v = load2(slot + 512 + 256 * page + 8 * group);
                    k_word[2 * page] = k.x; k_word[2 * page + 1] = k.y;
                    v_next[2 * page] = v.x; v_next[2 * page + 1] = v.y;
                }
#else
                {
                    const uint2 k = load2(slot + 128 * sub + 8 * group), v = load2(slot + 256 + 128 * sub + 8 * group);
                    k_word[0] = k.x; k_word[1] = k.y;
                    v_next[0] = v.x; v_next[1] = v.y;
                }
#endif
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
                    u32 (&cosine)[PAIRS] = cosines[s], (&sine)[PAIRS] = sines[s];
                    u32 k[2][PAIRS];
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        const int i = side ? after : before;
                        lookup(k[side], smem, k_word[i / 4], lane_base, i % 4);
                    }
                    u32 p0 = 0, p1 = 0;
#pragma unroll
                    for (int e = 0; e < PAIRS; e++) {
                        u32 c = mul2(uh[e], cosine[e]);
                        u32 x0 = fma2(negate2(wh[e]), sine[e], c), x1 = fma2(wh[e], sine[e], c);
                        p0 = e == 0 ? mul2(k[0][e], x0) : fma2(k[0][e], x0, p0);
                        p1 = e == 0 ? mul2(k[1][e], x1) : fma2(k[1][e], x1, p1);
                    }
                    product[before] = p0;
                    product[after] = p1;
                }
#if C == 4
                float step_cos[C], step_sin[C];  // rotation to the next span
                load_shared(step_cos, offsets + 10 * 4 * HALF);
                load_shared(step_sin, offsets + (OFFSETS + 10) * 4 * HALF);
#endif
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
                if (pipelined) values();
#pragma unroll
                for (int i = 0; i < SPAN / 4; i++) v_word[i] = v_next[i];
                // Sum over the rows; every hop leaves a lane with half of its tokens.
                bool upper = lane & (16 / SUBS);
                float x0 = (upper ? d[2] : d[0]) + __shfl_xor_sync(0xffffffffu, upper ? d[0] : d[2], 16 / SUBS);
                float x1 = (upper ? d[3] : d[1]) + __shfl_xor_sync(0xffffffffu, upper ? d[1] : d[3], 16 / SUBS);
                bool odd = lane & (8 / SUBS);
                float score = (odd ? x1 : x0) + __shfl_xor_sync(0xffffffffu, odd ? x0 : x1, 8 / SUBS);
#if SUBS == 1
                score = xor_add(score, 4);
                score = done == plan.z && upper ? NONE : score;
#else
                score = done == plan.z && sub ? NONE : score;
#endif
                state.raise(score);
                float weight = exp2_(score - state.maximum);
                state.sum += weight;
                weights ^= 32;
                if (!(lane & SPARE))
                    asm volatile("st.shared.b16 [%0], %1;" :: "r"(weights + weight_offset), "h"((u16)pack2(weight, weight)) : "memory");
                advance();
            };
            span(false);
#pragma unroll 1
            for (done++; done < stop; done++) span(true);
            values();
            total.merge(state);
        }

        // Parts of a shared row are merged by the team's last warp; nobody waits.
        if (plan.w) {
            float* const buffer = merge + merges % BUFFERS * (TEAM * PARTIAL);
            // The row that used the buffer before must have been merged; hardly ever waits.
            while (merged[merges % BUFFERS] < merges / BUFFERS) {}
            float* const to = buffer + member * PARTIAL;
#pragma unroll
            for (int e = 0; e < C; e += 4)
                *(float4*)(to + e / 4 * 128 + 4 * lane) = make_float4(total.acc[e], total.acc[e + 1], total.acc[e + 2], total.acc[e + 3]);
            to[32 * C + lane] = total.sum;
            if (lane == 0) to[32 * C + 32] = total.maximum;
            merges++;
            __threadfence_block();
            __syncwarp();
            int before = 0;
            if (lane == 0) before = atomicAdd((int*)written + (merges - 1) % BUFFERS, 1);
            if (__shfl_sync(0xffffffffu, before, 0) != (merges - 1) / BUFFERS * TEAM + TEAM - 1) continue;
            __threadfence_block();
            total.clear();
#pragma unroll 1
            for (int i = 0; i < TEAM; i++) {
                const float* const from = buffer + i * PARTIAL;
                Softmax part;
#pragma unroll
                for (int e = 0; e < C; e += 4) {
                    const float4 a = *(const float4*)(from + e / 4 * 128 + 4 * lane);
                    part.acc[e] = a.x; part.acc[e + 1] = a.y; part.acc[e + 2] = a.z; part.acc[e + 3] = a.w;
                }
                part.sum = from[32 * C + lane];
                part.maximum = from[32 * C + 32];
                total.merge(part);
            }
        }

        // The slice.
        float sum = xor_add(xor_add(xor_add(total.sum, 1), SUBS == 1 ? 2 : 4), 8);
        sum = xor_add(sum, 16);
#if SUBS == 2
#pragma unroll
        for (int e = 0; e < C; e++) total.acc[e] = xor_add(total.acc[e], 16);
#endif
        const i64 here = (i64)row * heads + head;
        float* const to = scratch + (here * slices + slice) * SLICE;
        if (sub == 0) {
#pragma unroll
            for (int e = 0; e < C; e += 4)
                *(float4*)(to + channel + e) = make_float4(total.acc[e], total.acc[e + 1], total.acc[e + 2], total.acc[e + 3]);
        }
        if (lane == 0) { to[DIM] = total.maximum; to[DIM + 1] = sum; }
        own |= !plan.w;
        if (plan.w) {
            __threadfence();
            __syncwarp();
            if (lane == 0) { merged[(merges - 1) % BUFFERS] = (merges - 1) / BUFFERS + 1; atomicAdd(counters + here, 1); }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    // The warp's own rows are made known together: a fence takes as long as some tokens.
    if (own) __threadfence();
    __syncwarp();
    for (int i = member + TEAM * lane; i < batch; i += 32 * TEAM)
        if (n_coded[i] <= quarter) atomicAdd(counters + (i64)i * heads + head, 1);

    // Every slice of a row is written when its counter says so; the row's turn goes to one warp of the head. All blocks
    // are resident (the caller launches at most one per multiprocessor), so waiting ends.
    for (int row = slice + slices * member; row < batch; row += slices * TEAM) {
        const i64 here = (i64)row * heads + head;
        if (lane == 0) {
            int arrived;
            for (;;) {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counters + here) : "memory");
                if (arrived >= slices) break;
                if (batch >= TEAM) __nanosleep(32);  // others compute; a lonely row is to be ready at once
            }
            counters[here] = 0;
        }
        __syncwarp();
        const float* from = scratch + here * slices * SLICE;
        float top = NONE, total = 0.0f;
        float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        // A lane has a slice's maximum and sum, and four channels of all slices: one latency for everything there is.
        for (int first = 0; first < slices; first += MERGE, from += MERGE * SLICE) {
            const int n = min(slices - first, MERGE);
            const float maximum = lane < n ? __ldcg(from + lane * SLICE + DIM) : NONE;
            float sum = lane < n ? __ldcg(from + lane * SLICE + DIM + 1) : 0.0f;
            float4 a[MERGE];
#pragma unroll
            for (int i = 0; i < MERGE; i++)
                a[i] = i < n ? __ldcg((const float4*)(from + i * SLICE + 4 * lane)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const float before = top;
            top = fmaxf(top, xor_max(xor_max(xor_max(xor_max(xor_max(maximum, 1), 2), 4), 8), 16));
            const float decay = exp2_(before - top), f = exp2_(maximum - top);
            sum *= f;
            total = total * decay + xor_add(xor_add(xor_add(xor_add(xor_add(sum, 1), 2), 4), 8), 16);
            acc.x *= decay; acc.y *= decay; acc.z *= decay; acc.w *= decay;
#pragma unroll
            for (int i = 0; i < MERGE; i++) {
                const float g = __shfl_sync(0xffffffffu, f, i);
                acc.x += g * a[i].x; acc.y += g * a[i].y; acc.z += g * a[i].z; acc.w += g * a[i].w;
            }
        }
        float inverse = total > 0.0f ? 1.0f / total : 0.0f;  // a row of length 0 gives zeros
        uint2 packed;
        packed.x = (u32)to_model(acc.x * inverse) | (u32)to_model(acc.y * inverse) << 16;
        packed.y = (u32)to_model(acc.z * inverse) | (u32)to_model(acc.w * inverse) << 16;
        *(uint2*)(out + here * DIM + 4 * lane) = packed;
    }
}
