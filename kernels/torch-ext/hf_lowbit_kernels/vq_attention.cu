// Decode attention over vector-quantized keys and values for sm_90, head_dim 128, one query head per kv head.
//
// Why CUDA and not Triton: the gathers must be free of shared-memory bank conflicts, and Triton cannot say which lane
// looks up which group. Here a lane owns four channels: a group (c = 4) or half of one (c = 8, where two lanes read the same
// codes). Both tables of a head are staged once per block as [256 entries][groups][c]: what entry e holds for a lane lies at
// byte 256 e + 8 lane, so the bank follows from the lane alone, and any 32 codes are looked up without a conflict. One byte
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
// Order of sums: a row's pages are cut into slices, one for each block of a head, and a slice into up to WARPS parts (see
// FEW_PARTS). Rows go to the warps in turn: one warp takes all parts of the slice, one after another, so that starting and
// ending a row is paid for once. In a last turn that would leave warps idle (the only one, of fewer than WARPS rows), several
// warps share a slice, and all of them share the slices of rows that would keep a single one longer than the others. Parts,
// then slices, are merged in a fixed order, whoever computed them: a row alone equals the row in any batch, bit for bit.
//
// Compiled by NVRTC without headers. Macros: CHANNELS (c: 4 or 8), HALF_INPUT (1: fp16 query and window, 0: bf16).

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

#define C 4                   // channels of a lane: a group (c = 4) or half of one (c = 8)
#define DIM 128
#define HALF 64
#define GROUPS (DIM / CHANNELS)
#define PAGE_BYTES (8 * GROUPS)
#define SPAN 16               // tokens: two pages
#define MIRRORS (SPAN / 2)    // pairs of tokens at equal distance from the middle of a span
#define PAIRS (C / 2)         // packed pairs of a lane
#define TABLE 65536           // bytes of one table
#define WARPS 12              // with 16 registers spill
#define SLICE 132             // floats of a slice in global memory: 128 outputs, maximum, sum, two unused
#define PARTIAL (32 * C + 20) // floats of a part in shared memory: outputs by lane, 16 sums, the maximum, three unused
#define NONE -1.0e30f         // finite: a warp without tokens gives exp2(0) * 0 and not NaN
// A slice has up to WARPS parts, one for each warp where a single row must keep all busy: short rows (latency is all that
// counts) and long ones. In between parts would be too short to start each: half as many.
#define FEW_PARTS(coded) ((coded) >= 2560 && (coded) < 7168)
#define HEADROOM 4.0f         // log2: weights stay below 2^4, far from the limits of fp16

#define MERGE 8               // slices of a row that are merged at a time
#define PARTIALS 48           // parts of shared slices that may be kept at once; their bytes are a multiple of 64
#define DEPTH 3               // items on their way to shared memory
// A slot holds an item: codes of a span (keys, then values), or two full-precision tokens (keys, then values); behind them
// what a row's or part's first item brings along.
#define ANGLES 1024           // fp32 [2, 64]: cosines and sines at the item's first position
#define QUERY 1536            // [128]
#define HEADER 1792           // struct Header, of a row's first item
#define SLOT 1824
#define RING_AT (2 * TABLE)
#define MERGE_AT (RING_AT + WARPS * DEPTH * SLOT)
#define OFFSET_AT (MERGE_AT + PARTIALS * PARTIAL * 4)
#define OFFSETS 10            // rows of cosines, then of sines: distances 0 to 7, middle of a span, 16
#define WEIGHT_AT (OFFSET_AT + 2 * OFFSETS * HALF * 4)
#define FLAG_AT (WEIGHT_AT + WARPS * 64)
#define FLAGS 16              // int: warps that have written, of WARPS rows; long rows merged, of two buffers; warps done; unused
#define MERGED WARPS
#define DONE (WARPS + 2)
#define PLAN_AT (FLAG_AT + 4 * FLAGS)
#define PLAN 64               // bytes of struct Plan, of each warp
#define SMEM_BYTES (PLAN_AT + WARPS * PLAN + 16)

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
__device__ __forceinline__ u32 negate2(u32 x) { u32 d; asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(x)); return d; }
__device__ __forceinline__ float choose(u32 mask, float a, float b) {  // a where the mask is all ones, b where it is zero
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(__float_as_uint(a)), "r"(__float_as_uint(b)));
    return __uint_as_float(d);
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

// This lane's part of an entry: code i of a word.
__device__ __forceinline__ void lookup(u32 (&entry)[PAIRS], const u8* table, u32 word, u32 lane_base, int i) {
    const uint2 x = *(const uint2*)(table + permute(word, lane_base, 0x5504 | i << 4));
    entry[0] = x.x; entry[1] = x.y;
}

// What a warp has to copy next. Kept in shared memory: registers are short, and it is rarely looked at.
struct Plan {
    int row, item, span, next_part;    // item: of two full-precision tokens, before the spans; next_part: its first span
    int items, end, page, end_page;    // spans end at `end`; pages [page, end_page) of the slice
    int part, tokens, turn, coded;     // spans of a part; full-precision tokens, and where the recent ones begin in their ring
    int sharers, member, place, flag;  // in the last turn: warps of the row, this one's number, where parts are kept, which flag
};
// What a warp does of a row.
struct Header {
    int row, tokens, spans, part;      // tokens in full precision, or none if they are another warp's; spans of a part
    int slice_spans;                   // of all sharers
    u8 sharers, flag;                  // warps that share the slice, or 0; which flag is theirs
    u8 place, first_part;              // where the slice's parts are kept, and this warp's first
    bool lonely;                       // the last span's second page does not exist
    bool window, is_long;              // full-precision tokens are this warp's; all warps share it
    bool at_once;                      // the slice is made known at once, not with all others
};
static_assert(sizeof(Plan) == PLAN && sizeof(Header) <= SLOT - HEADER, "they have their places in shared memory");

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
    const int split = blockIdx.x, splits = gridDim.x;
    const int channel = lane * C, in_half = channel % HALF;
    const bool second = channel >= HALF;
    float* const merge = (float*)(smem + MERGE_AT);
    u32 weights = (u32)__cvta_generic_to_shared(smem + WEIGHT_AT) + warp * 64;  // fp16 [16], twice: read and written in turn
    const u32 offsets = (u32)__cvta_generic_to_shared(smem + OFFSET_AT) + 4 * in_half;  // cos, then sin, [OFFSETS, 64] each
    const u32 smem_begin = (u32)__cvta_generic_to_shared(smem), ring_begin = smem_begin + RING_AT + warp * (DEPTH * SLOT);
    volatile int* const written = (volatile int*)(smem + FLAG_AT);
    volatile int* const merged = written + MERGED;

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
    if (threadIdx.x < FLAGS) ((int*)(smem + FLAG_AT))[threadIdx.x] = 0;
    for (int i = threadIdx.x; i < 2 * OFFSETS * HALF / 4; i += WARPS * 32) {  // arrive with the warp's first item
        const int distance = i % (OFFSETS * HALF / 4) / (HALF / 4), at = i % (HALF / 4) * 4;
        const bool sines = i >= OFFSETS * HALF / 4;
        const float* from = distance == 8 ? (sines ? mirror_sin : mirror_cos) + (MIRRORS - 1) * HALF
                                          : (sines ? offset_sin : offset_cos) + (distance < 8 ? distance : 16) * HALF;
        copy16((u32)__cvta_generic_to_shared(smem + OFFSET_AT) + 16 * i, from + at);
    }
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
    // Column n of the sums is token n (and n + 8) of the span.
    u32 ones[8];
#pragma unroll
    for (int n = 0; n < 8; n++) {
        u32 bits = (lane >> 2) == n ? 0x3c003c00u : 0u;
        ones[n] = __shfl_sync(0xffffffffu, bits, lane);  // kept: the compiler would compute it every time
    }

    // Lengths are older than the kernel before this one; see dependent_launch.py. Those that are read later lie in the L1 cache then.
    if (lane < batch) { int unused; asm volatile("ld.global.b32 %0, [%1];" : "=r"(unused) : "l"(lengths + lane)); }
    // Long rows: one warp would take half again as long for one as for its share of all rows.
    const int own_coded = lane < batch ? n_coded[lane] : 0;
    int all_coded = own_coded, most = own_coded;
    for (int i = lane + 32; i < batch; i += 32) { all_coded += n_coded[i]; most = max(most, n_coded[i]); }
    if (batch > 1) {
        all_coded = __reduce_add_sync(0xffffffffu, all_coded);
        most = __reduce_max_sync(0xffffffffu, (u32)most);
    }
    int fair = batch > WARPS ? all_coded / WARPS + all_coded / (2 * WARPS) : 0x7fffffff;
    // Rows of the last turn, if it is to be shared. Late in a large batch it is not worth it.
    int rest = batch <= WARPS ? batch : most > fair || batch > 8 * WARPS || batch % WARPS > WARPS / 2 ? 0 : batch % WARPS;

    auto parts_of = [&](int coded, int& share, int& part) {  // of a whole slice; share: its pages, part: spans of one
        const int pages = coded >> 3;
        share = (int)((u32)(pages + splits - 1) / (u32)splits + 1) & ~1;  // whole spans
        part = max(FEW_PARTS(coded) ? (share / 2 + WARPS / 2 - 1) / (WARPS / 2) : (share / 2 + WARPS - 1) / WARPS, 2);
        return (share / 2 + part - 1) / part;
    };
    Plan* const kept = (Plan*)(smem + PLAN_AT) + warp;
    int rest_row = batch;
    {
        Plan plan = {};
        plan.row = -1;
        if (batch == 1) {  // as below, without asking anybody: a single row is to be ready soon
            plan.sharers = WARPS;
            plan.member = warp;
            rest_row = 0;
        } else if (rest) {
            // A lane for each row: one warp, and of the others according to its length; places for its parts.
            const int coded = batch <= WARPS ? own_coded : lane < rest ? n_coded[batch - rest + lane] : 0;
            const int sum = batch <= WARPS ? all_coded : (int)__reduce_add_sync(0xffffffffu, (u32)coded);
            int share, part, sharers = lane < rest ? 1 + (int)((u32)((WARPS - rest) * coded) / (u32)max(sum, 1)) : 0;
            int end = sharers, place = sharers > 1 ? max(parts_of(coded, share, part), 1) + (sharers == WARPS) : 0;
            const int places = place;
#pragma unroll
            for (int hop = 1; hop < 16; hop <<= 1) {
                const int before = __shfl_up_sync(0xffffffffu, end, hop), places_before = __shfl_up_sync(0xffffffffu, place, hop);
                if (lane >= hop) { end += before; place += places_before; }
            }
            if (__shfl_sync(0xffffffffu, place, rest - 1) > PARTIALS) {  // no room: all warps share them one by one, or none does
                rest = 0;
                if (batch <= WARPS) fair = -1;
            } else {
                const int mine = __ffs(__ballot_sync(0xffffffffu, lane < rest && warp < end)) - 1;
                if (mine >= 0) {
                    plan.sharers = __shfl_sync(0xffffffffu, sharers, mine);
                    plan.member = warp - __shfl_sync(0xffffffffu, end - sharers, mine);
                    plan.place = __shfl_sync(0xffffffffu, place - places, mine);
                    plan.flag = mine;
                    rest_row = batch - rest + mine;
                }
            }
        }
        if (lane == 0) *kept = plan;
        __syncwarp();
    }
    const bool any_long = most > fair;

    // ---- copies to shared memory, DEPTH items ahead. An item: a span of codes, or two full-precision tokens, or nothing.

    // The first row from `from` on that this warp has a part in.
    auto find_row = [&](int from) {
        int row = from;
        if (any_long)
            while (row < batch && n_coded[row] <= fair && row % WARPS != warp) row++;
        else
            row += (warp + WARPS - row % WARPS) % WARPS;
        return row < batch - rest ? row : from <= rest_row ? rest_row : batch;
    };
    int ahead_fast = 0;            // spans that follow one another
    const u8* ahead_codes = k_codes;  // this lane's 16 bytes of the next span
    int long_rows = 0, first_warp = 0;  // first_warp: the one that takes the first part of the next long row
    auto copy_codes = [&](u32 slot, const u8* from) {
#if CHANNELS == 4
        copy16(slot + 16 * lane, from);
        copy16(slot + 512 + 16 * lane, from + (v_codes - k_codes));
#else
        copy16(slot + 16 * lane, from);
#endif
    };
    // This lane's 16 bytes of the span that begins at `page`. A lonely last page is its own partner, unused.
    auto codes_at = [&](int row, int page, int end) {
        const int mine = min(page + (lane / (PAGE_BYTES / 16) & 1), end - 1);
        const u8* from = CHANNELS == 8 && lane >= 16 ? v_codes : k_codes;
        return from + row * stride_cb + (u64)(u32)mine * stride_cp + head * PAGE_BYTES + lane % (PAGE_BYTES / 16) * 16;
    };
    auto copy_angles = [&](u32 slot, int position) {
        const float* from = (lane < 16 ? base_cos : base_sin) + (i64)(position >> 3) * HALF + 4 * (lane & 15);
        copy16(slot + ANGLES + 16 * lane, from);
    };
    auto header_at = [&](u32 slot) -> Header& { return *(Header*)(smem + (slot - smem_begin) + HEADER); };
    // Plans this warp's part of a row, and tells whoever reads the slot.
    auto begin_row = [&](Plan& plan, u32 slot) {
        const int length = lengths[plan.row], pages = (plan.coded = n_coded[plan.row]) >> 3;
        int share;
        const int parts = parts_of(plan.coded, share, plan.part);
        plan.page = min(split * share, pages);
        plan.end_page = min(plan.page + share, pages);
        const int spans = (plan.end_page - plan.page + 1) >> 1;
        const bool is_long = plan.coded > fair, is_rest = plan.row == rest_row;
        int others = 1, member = 0, each = parts, place = 0, flag = 0;  // each: parts of a warp
        if (is_long) {
            others = WARPS;
            member = warp - first_warp + (warp < first_warp ? WARPS : 0);
            each = 1;
            flag = long_rows++ % 2;
            place = flag * (PARTIALS / 2);
            first_warp += parts;
            if (first_warp >= WARPS) first_warp -= WARPS;
        } else if (is_rest) {
            others = plan.sharers;
            member = plan.member;
            each = (u32)(parts + others - 1) / (u32)others;
            place = plan.place;
            flag = plan.flag;
        }
        // Full-precision tokens: with the first part, or if all warps share the slice apart from it, with the shortest.
        const bool window = member == (others == WARPS ? WARPS - 1 : 0);
        plan.span = plan.next_part = min(member * each * plan.part, spans);
        plan.end = min((member + 1) * each * plan.part, spans);
        plan.tokens = min(length, sinks) + max(length - sinks - plan.coded, 0);
        plan.turn = plan.coded % ring;
        plan.item = window ? split : 0;
        plan.items = window ? (plan.tokens + 1) >> 1 : 0;
        if (lane == 0) {
            Header header;
            header.row = plan.row;
            header.tokens = window ? plan.tokens : 0;
            header.spans = plan.end - plan.span;
            header.part = plan.part;
            // A lonely page is in the last span of the slice.
            header.lonely = (plan.end_page - plan.page) % 2 && plan.end == spans;
            header.sharers = others > 1 ? others : 0;
            header.flag = flag;
            header.place = place;
            header.first_part = place + (others == WARPS) + member * each;
            header.slice_spans = spans;
            header.window = window;
            header.is_long = is_long;
            header.at_once = is_long || is_rest;
            header_at(slot) = header;
        }
        if (lane < 16) copy16(slot + QUERY + 16 * lane, query + plan.row * stride_qb + head * stride_qh + 8 * lane);
    };
    // Copies what follows and is not a span behind a span.
    auto copy_rare = [&](u32 slot) {
        Plan plan = *kept;
        if (plan.row < batch && plan.item >= plan.items && plan.span >= plan.end) {
            plan.row = find_row(plan.row + 1);
            if (plan.row < batch) begin_row(plan, slot);
        }
        if (plan.row >= batch) {
            if (lane == 0) header_at(slot).row = batch;
        } else if (plan.item < plan.items) {
            const int token = min(2 * plan.item + (lane >> 4), plan.tokens - 1);
            int at = token + (token < sinks ? 0 : plan.turn);
            if (at >= sinks + ring) at -= ring;
            const u16* from = k_window + plan.row * stride_wb + head * stride_wh + (i64)at * stride_ws + 8 * (lane & 15);
            copy16(slot + 16 * lane, from);
            copy16(slot + 512 + 16 * lane, from + (v_window - k_window));
            copy_angles(slot, 2 * plan.item < sinks ? 2 * plan.item : 2 * plan.item + plan.coded);
            plan.item += splits;
        } else if (plan.span < plan.end) {
            const int page = plan.page + 2 * plan.span;
            copy_codes(slot, codes_at(plan.row, page, plan.end_page));
            if (plan.span == plan.next_part) {
                copy_angles(slot, 8 * page + sinks);
                plan.next_part += plan.part;
            }
            plan.span++;
            const int next = min(plan.next_part, plan.end);
            // Up to the next part, or to a lonely page.
            ahead_fast = max(next - plan.span - (2 * next > plan.end_page - plan.page), 0);
            ahead_codes = codes_at(plan.row, page + 2, plan.end_page);
            plan.span += ahead_fast;
        }
        __syncwarp();
        if (lane == 0) *kept = plan;
        __syncwarp();
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
    // What the kernel before this one wrote, query and window, is read from here on.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
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

    // Where this lane's weight goes: its token within the span; lanes that differ in bit 2 hold the same.
    u32 weight_at = weights + 2 * (2 * (lane & 3) + (lane >> 3 & 1) + 8 * (lane >> 4));
    const u32 upper = __shfl_sync(0xffffffffu, lane & 16 ? ~0u : 0u, lane), odd = __shfl_sync(0xffffffffu, lane & 8 ? ~0u : 0u, lane);
    const u32 lane_base = 8 * lane;  // bytes 1 to 3 are zero
    __syncthreads();  // barriers, flags and offsets are there
    int merges = 0;  // of long rows
    bool staged = false, own = false;

    for (;;) {
        const Header header = header_at(slot);
        if (header.row >= batch) break;
        // A long row that used the buffer before must have been merged; hardly ever waits.
        if (header.is_long) while (merged[header.flag] < merges / 2) {}
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
        auto keep = [&](const Softmax& part, int at) {
            float* const to = merge + at * PARTIAL;
            *(float4*)(to + 4 * lane) = make_float4(part.acc[0], part.acc[1], part.acc[2], part.acc[3]);
            if (!(lane & 4)) to[32 * C + (lane & 3) + (lane >> 3) * 4] = part.sum;
            if (lane == 0) to[32 * C + 16] = part.maximum;
        };

        // Full-precision tokens in fp32, two neighbours of one page at a time: sinks first, then the positions from
        // sinks + coded on. They come first: the tables are still on their way.
        const int items = (header.tokens + 1) >> 1;
        if (split >= items && header.spans == 0) advance();
#pragma unroll 1
        for (int item = split; item < items; item += splits) {
            float u[C], w[C], score[2], top = NONE;
            rotate_query(u, w);
            u32 v_bits[2][PAIRS];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                float c2[C], s2[C];
                const u32 offset = offsets + (((2 * item) & 7) + t) * (4 * HALF);
                load_shared(c2, offset);
                load_shared(s2, offset + OFFSETS * 4 * HALF);
                u32 k_bits[PAIRS];
                load_packed(k_bits, slot + 256 * t + 2 * channel);
                load_packed(v_bits[t], slot + 512 + 256 * t + 2 * channel);
                score[t] = 0.0f;
#pragma unroll
                for (int e = 0; e < C; e++) {
                    const u16 k = e % 2 ? k_bits[e / 2] >> 16 : k_bits[e / 2] & 0xffff;
                    score[t] += from_model(k) * (u[e] * c2[e] + w[e] * s2[e]);
                }
            }
#pragma unroll
            for (int t = 0; t < 2; t++) {
#pragma unroll
                for (int hop = 16; hop > 0; hop >>= 1) score[t] = xor_add(score[t], hop);
                if (2 * item + t >= header.tokens) score[t] = NONE;
                top = fmaxf(top, score[t]);
            }
            top = fmaxf(top, total.maximum);
            const float decay = exp2_(total.maximum - top);
            total.maximum = top;
            total.sum *= decay;
#pragma unroll
            for (int e = 0; e < C; e++) total.acc[e] *= decay;
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const float weight = exp2_(score[t] - top);
                if ((lane & ~4) == 0) total.sum += weight;
#pragma unroll
                for (int e = 0; e < C; e++) {
                    const u16 v = e % 2 ? v_bits[t][e / 2] >> 16 : v_bits[t][e / 2] & 0xffff;
                    total.acc[e] += weight * from_model(v);
                }
            }
            advance();
        }

        int next_part = header.first_part;
        if (header.sharers && header.window && (header.sharers == WARPS || header.spans == 0)) {
            keep(total, header.place);
            total.clear();
        }
        if (!staged && header.spans > 0) {
            staged = true;
#pragma unroll
            for (int side = 0; side < 2; side++)
                asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n@p bra done;\nbra wait;\ndone:\n}"
                             :: "r"(barrier + 8 * side) : "memory");
        }
#pragma unroll 1
        for (int done = 0; done < header.spans;) {
            const int stop = min(done + header.part, header.spans);
            Softmax state;
            state.clear();
            float u[C], w[C];
            {
                float c2[C], s2[C], u0[C], w0[C];
                rotate_query(u0, w0);
                // On to the middle: the last distance.
                load_shared(c2, offsets + 8 * 4 * HALF);
                load_shared(s2, offsets + (OFFSETS + 8) * 4 * HALF);
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
                    const int4 x = load4i(weights + 16 * i);
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
#pragma unroll
                for (int page = 0; page < 2; page++) {
                    const uint2 k = load2(slot + PAGE_BYTES * page + 8 * (4 * lane / CHANNELS)), v = load2(slot + PAGE_BYTES * (2 + page) + 8 * (4 * lane / CHANNELS));
                    k_word[2 * page] = k.x; k_word[2 * page + 1] = k.y;
                    v_next[2 * page] = v.x; v_next[2 * page + 1] = v.y;
                }
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
                float step_cos[C], step_sin[C];  // rotation to the next span
                load_shared(step_cos, offsets + 9 * 4 * HALF);
                load_shared(step_sin, offsets + (OFFSETS + 9) * 4 * HALF);
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
                float x0 = choose(upper, d[2], d[0]) + __shfl_xor_sync(0xffffffffu, choose(upper, d[0], d[2]), 16);
                float x1 = choose(upper, d[3], d[1]) + __shfl_xor_sync(0xffffffffu, choose(upper, d[1], d[3]), 16);
                float score = choose(odd, x1, x0) + __shfl_xor_sync(0xffffffffu, choose(odd, x0, x1), 8);
                score = xor_add(score, 4);
                if (header.lonely && done == header.spans - 1) score = choose(upper, NONE, score);
                state.raise(score);
                float weight = exp2_(score - state.maximum);
                state.sum += weight;
                weights ^= 32;
                weight_at ^= 32;
                asm volatile("st.shared.b16 [%0], %1;" :: "r"(weight_at), "h"((u16)pack2(weight, weight)) : "memory");
                advance();
            };
            span(false);
#pragma unroll 1
            for (done++; done < stop; done++) span(true);
            values();
            total.merge(state);  // which nothing merged before changes by no bit
            if (header.sharers) {
                keep(total, next_part++);
                total.clear();
            }
        }

        // Parts of a shared slice are merged by the last of its warps; nobody waits.
        if (header.sharers) {
            __threadfence_block();
            __syncwarp();
            int before = 0;
            if (lane == 0) before = atomicAdd((int*)written + header.flag, 1);
            const int use = header.is_long ? merges++ / 2 : 0;
            if (__shfl_sync(0xffffffffu, before, 0) != use * header.sharers + header.sharers - 1) continue;
            __threadfence_block();
            // The roundings of `merge`, part by part, but all loads and exponentials at one latency.
            const int coded_parts = (header.slice_spans + header.part - 1) / header.part;
            const int parts = header.sharers == WARPS ? coded_parts + 1 : max(coded_parts, 1);
            const float* from = merge + header.place * PARTIAL;
            const float maximum = lane < parts ? from[lane * PARTIAL + 32 * C + 16] : NONE;
            float top = maximum;
#pragma unroll
            for (int hop = 1; hop < 16; hop <<= 1) {
                const float other = __shfl_up_sync(0xffffffffu, top, hop);
                if (lane >= hop) top = fmaxf(top, other);
            }
            const float before_top = __shfl_up_sync(0xffffffffu, top, 1);
            const float f = exp2_((lane ? before_top : NONE) - top), g = exp2_(maximum - top);
            total.clear();
#pragma unroll 4
            for (int i = 0; i < parts; i++, from += PARTIAL) {
                const float fi = __shfl_sync(0xffffffffu, f, i), gi = __shfl_sync(0xffffffffu, g, i);
                const float4 a = *(const float4*)(from + 4 * lane);
                total.sum = __fmaf_rn(total.sum, fi, __fmul_rn(from[32 * C + (lane & 3) + (lane >> 3) * 4], gi));
                total.acc[0] = __fmaf_rn(total.acc[0], fi, __fmul_rn(a.x, gi));
                total.acc[1] = __fmaf_rn(total.acc[1], fi, __fmul_rn(a.y, gi));
                total.acc[2] = __fmaf_rn(total.acc[2], fi, __fmul_rn(a.z, gi));
                total.acc[3] = __fmaf_rn(total.acc[3], fi, __fmul_rn(a.w, gi));
            }
            total.maximum = __shfl_sync(0xffffffffu, top, parts - 1);
            if (header.is_long) {
                __syncwarp();
                if (lane == 0) merged[header.flag] = use + 1;
            }
        }

        // The slice.
        const float sum = xor_add(xor_add(xor_add(xor_add(total.sum, 1), 2), 8), 16);
        const i64 here = (i64)header.row * heads + head;
        float* const to = scratch + (here * splits + split) * SLICE;
        *(float4*)(to + channel) = make_float4(total.acc[0], total.acc[1], total.acc[2], total.acc[3]);
        if (lane == 0) { to[DIM] = total.maximum; to[DIM + 1] = sum; }
        if (header.at_once) {
            __threadfence();
            __syncwarp();
            if (lane == 0) atomicAdd(counters + here, 1);
        } else {
            own = true;
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    // The other slices of the block are made known together: a fence takes as long as some tokens.
    if (own) __threadfence();
    __syncwarp();
    int done = 0;
    if (lane == 0) done = atomicAdd((int*)written + DONE, 1);
    if (__shfl_sync(0xffffffffu, done, 0) == WARPS - 1) {
        __threadfence();
        for (int i = lane; i < batch - rest; i += 32)
            if (n_coded[i] <= fair) atomicAdd(counters + (i64)i * heads + head, 1);
    }

    // Every slice of a row is written when its counter says so; the row's turn goes to one warp of the head. All blocks
    // are resident (the caller launches at most one per multiprocessor), so waiting ends.
    for (int row = split + splits * warp; row < batch; row += splits * WARPS) {
        const i64 here = (i64)row * heads + head;
        if (lane == 0) {
            int arrived;
            for (;;) {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counters + here) : "memory");
                if (arrived >= splits) break;
                if (batch >= WARPS) __nanosleep(32);  // others compute; a lonely row is to be ready at once
            }
            counters[here] = 0;
        }
        __syncwarp();
        const float* from = scratch + here * splits * SLICE;
        float top = NONE, total = 0.0f;
        float4 acc = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        // A lane has a slice's maximum and sum, and four channels of all slices: one latency for everything there is.
        for (int first = 0; first < splits; first += MERGE, from += MERGE * SLICE) {
            const int n = min(splits - first, MERGE);
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
