// Nearest codebook entry (LoopVQ) for sm_90. vq_encode_reference.py is the specification.
//
// A block takes GROUPS neighbouring groups of one head and a range of tokens. It multiplies the entries by the metric once,
// in fp32, and keeps each product as the sum of two bf16 numbers, hi + lo. A warpgroup then takes 64 tokens of a group: states
// from registers as they lie in memory (fp16 ones as two bf16 numbers), products with hi and lo summed in fp32 on the tensor
// cores, and minus the norm, three bf16 numbers, times ones. Each product of 64 tokens and 64 entries runs while the scores of
// the one before are looked through.
//
// The order of coordinates within a product is free as long as both operands agree. Lane t of four holds coordinates
// t * PIECE to (t + 1) * PIECE - 1 of a vector, in order (step, channel), so that it loads one piece of memory. Vectors of 8
// coordinates fill half a product: the other half takes them again, times lo.
//
// What binds is finding the largest of 256 scores. Comparisons issue at half the rate of additions, so there is one
// comparison a score: four scores are reduced to their maximum and compared with the best so far; where that wins, what is
// needed to tell the four apart later is moved by predicated additions of -0.
//
// A token's code does not depend on other tokens. Equal scores give the lowest code.
//
// Compiled by NVRTC without headers, for sm_90a. Macros: STEPS, CHANNELS (their product is 8, 16 or 32), HALF_INPUT (states are
// fp16, else bf16), WEIGHTED (there is a metric), VECTOR (pieces, of tables too, are contiguous and aligned), PAGED (keys and
// values of a chunk and of the window before it, a tensor for each step; else one tensor of vectors), WARPGROUPS.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct Side {  // keys, or values
    const u16 *tables;
    const float *half_norms, *metric;
    const u16 *states[4], *window;  // states: of each step (PAGED), or all of them
};
struct Sides { Side of[2]; };

#define SIZE (STEPS * CHANNELS)
#define PIECE (SIZE / 4)           // coordinates of a lane
#define WORDS (SIZE / 8)           // the same in 32-bit words
#define GROUPS (64 / SIZE)         // of a block
#define SPAN (VECTOR && STEPS == 4 && CHANNELS == 4 ? 2 : 1)  // neighbouring groups that a lane loads at once, 16 bytes
#define CHUNK 64                   // tokens of a warpgroup
#define THREADS (128 * WARPGROUPS)
#define SLICE 64                   // entries of a product
#define FULL 0xffffffffu
// Shared memory of a group: products of 16 coordinates with all entries, hi, then lo, then the norms. Of each: coordinates 0 to
// 7, then 8 to 15, as 16 bytes an entry.
#define HIGHS (SIZE == 32 ? 2 : 1)             // products with hi; SIZE == 8: with hi and lo
#define PRODUCTS (SIZE == 8 ? 2 : 2 * HIGHS + 1)
#define HALF_PRODUCT 4096
#define PRODUCT (2 * HALF_PRODUCT)
#define PARTS (HALF_INPUT ? 2 : 1)             // bf16 numbers of a state

__device__ __forceinline__ float from_half(u16 x) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f; }
// Two bf16 numbers in a word, the first one in the low half.
__device__ __forceinline__ u32 pack(float a, float b) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a)); return d; }
__device__ __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// d = a b, or d += a b if `more`: 64 tokens (registers, 16 a warp), 16 coordinates, 64 entries (shared memory). Asynchronous.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
__device__ __forceinline__ void multiply(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
        : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(more));
}
// Products that were asked for since the last commit: up to `left` commits may go on.
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int left> __device__ __forceinline__ void wait_for(float (&d)[32]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(left) : "memory");
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i]) :: "memory");  // not to be read before
}

// Best four scores so far: the largest, the larger of the first two, the first, the third, and the first one's code.
struct Best { float top, pair, first, third, code; };

// `nothing` is -0, from the host, so that the compiler cannot know: sums with it are copies that do not use the comparisons' unit.
__device__ __forceinline__ void keep(Best& best, float top, float pair, float first, float third, float code, float step, float nothing) {
    asm("{.reg .pred p; setp.gt.f32 p, %5, %0;\n"
        "@p add.rn.f32 %0, %5, %11; @p add.rn.f32 %1, %6, %11; @p add.rn.f32 %2, %7, %11; @p add.rn.f32 %3, %8, %11; @p add.rn.f32 %4, %9, %10;}"
        : "+f"(best.top), "+f"(best.pair), "+f"(best.first), "+f"(best.third), "+f"(best.code)
        : "f"(top), "f"(pair), "f"(first), "f"(third), "f"(code), "f"(step), "f"(nothing));
}

// Coordinate j of lane t.
__device__ __forceinline__ int step_of(int t, int j) { return (t * PIECE + j) / CHANNELS; }
__device__ __forceinline__ int channel_of(int t, int j) { return (t * PIECE + j) % CHANNELS; }

// Entries times metric of one group: those of lane t of four.
__device__ __forceinline__ void weighted(float (&p)[PIECE], const u16* tables, const float* metric, int head, int heads, int group, int groups, int entry, int t) {
#if VECTOR && CHANNELS % PIECE == 0 && PIECE >= 4
    const int at = (step_of(t, 0) * heads + head) * groups + group;
    const u16* from = tables + ((i64)at * 256 + entry) * CHANNELS + channel_of(t, 0);
#pragma unroll
    for (int j = 0; j < PIECE; j += 4) {
        const uint2 x = *(const uint2*)(from + j);
        p[j] = from_half(x.x & 0xffff); p[j + 1] = from_half(x.x >> 16);
        p[j + 2] = from_half(x.y & 0xffff); p[j + 3] = from_half(x.y >> 16);
#if WEIGHTED
        const float4 w = *(const float4*)(metric + at * CHANNELS + channel_of(t, j));
        p[j] *= w.x; p[j + 1] *= w.y; p[j + 2] *= w.z; p[j + 3] *= w.w;
#endif
    }
#else
#pragma unroll
    for (int j = 0; j < PIECE; j++) {
        const int at = (step_of(t, j) * heads + head) * groups + group;
        p[j] = from_half(tables[((i64)at * 256 + entry) * CHANNELS + channel_of(t, j)]);
#if WEIGHTED
        p[j] *= metric[at * CHANNELS + channel_of(t, j)];
#endif
    }
#endif
}

// PAGED: tokens of each row; first: the first of them among those of the window, at `slots`, followed by the chunk's.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
vq_encode(const __grid_constant__ Sides sides, u8* __restrict__ codes, int tokens, int heads, int groups, int tokens_per_block,
          i64 stride_t, i64 stride_n, i64 stride_h, i64 stride_d, float nothing,
          const i64* __restrict__ slots, int lead, int first_token, int blocks_per_row, i64 stride_b,
          i64 stride_wt, i64 stride_wb, i64 stride_wh, i64 stride_wn,
          i64 stride_cs, i64 stride_cb, i64 stride_cp, i64 stride_ch, i64 stride_cg, i64 stride_cn) {
    const Side& side = sides.of[blockIdx.z];
    const u16* const tables = side.tables;
    const float *const half_norms = side.half_norms, *const metric = side.metric;
    extern __shared__ __align__(128) u8 shared[];
    const u32 operands = (u32)__cvta_generic_to_shared(shared);
    const int blocks = (groups + GROUPS - 1) / GROUPS;
    const int head = blockIdx.x / blocks, first_group = blockIdx.x % blocks * GROUPS;
    const int live = min(GROUPS, groups - first_group);
    const int thread = threadIdx.x, lane = thread % 32, t = lane % 4;
    const int team = __shfl_sync(FULL, thread / 128, 0);  // so that the compiler knows that a warp agrees

    for (int i = thread; i < live * 1024; i += THREADS) {
        const int entry = i / 4 % 256, slot = i / 1024;  // t: its four lanes
        float p[PIECE];
        weighted(p, tables, metric, head, heads, first_group + slot, groups, entry, t);
        u8* const to = shared + slot * (PRODUCTS * PRODUCT) + entry * 16 + t * 4;
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const u32 hi = pack(p[2 * j], p[2 * j + 1]);
            const u32 lo = pack(p[2 * j] - low(hi), p[2 * j + 1] - high(hi));
            u8* const at = to + j / 2 * PRODUCT + j % 2 * HALF_PRODUCT;
            *(u32*)at = hi;
            *(u32*)(at + (SIZE == 8 ? HALF_PRODUCT : HIGHS * PRODUCT)) = lo;
        }
        // Lanes 0 and 1 hold the norm, the others and the second half nothing.
        u8* const norm_at = to + (PRODUCTS - 1) * PRODUCT;
        const float n = -half_norms[((i64)head * groups + first_group + slot) * 256 + entry];
        const u32 first = pack(n, 0.0f);
        const float rest = n - low(first);
        const u32 both = first | pack(0.0f, rest) & 0xffff0000u;
        *(u32*)norm_at = t == 0 ? both : t == 1 ? pack(rest - high(both), 0.0f) : 0;
        *(u32*)(norm_at + HALF_PRODUCT) = 0;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

#if PAGED
    const int batch_row = blockIdx.y / blocks_per_row, first = blockIdx.y % blocks_per_row * tokens_per_block;
#else
    const int batch_row = 0, first = blockIdx.y * tokens_per_block;
#endif
    const int end = min(first + tokens_per_block, tokens);
    const int spans = (live + SPAN - 1) / SPAN, units = (end - first + CHUNK - 1) / CHUNK * spans;
    const int own_row = thread % 128 / 32 * 16 + lane / 4;
    // The states of a unit: this lane's rows, 8 apart.
    auto load = [&](u32 (&x)[2][WORDS * SPAN], int unit) {
        const int row = first + unit / spans * CHUNK + own_row, at_channel = (first_group + unit % spans * SPAN) * CHANNELS;
#pragma unroll
        for (int a = 0; a < 2; a++) {
            const int token = min(row + 8 * a, end - 1);
            u32 (&w)[WORDS * SPAN] = x[a];
#if PAGED
            const int step = step_of(t, 0), at = token + first_token;
            const u16* piece = at < lead
                ? side.window + step * stride_wt + batch_row * stride_wb + head * stride_wh + slots[at] * stride_wn
                : side.states[step] + batch_row * stride_b + head * stride_h + (at - lead) * stride_n;
            piece += at_channel + channel_of(t, 0);
#else
            const u16* state = side.states[0] + head * stride_h + at_channel * stride_d + token * stride_n;
            const u16* piece = state + step_of(t, 0) * stride_t + channel_of(t, 0);
#endif
#if VECTOR
            if (WORDS * SPAN == 1) w[0] = *(const u32*)piece;
            if (WORDS * SPAN == 2) { const uint2 v = *(const uint2*)piece; w[0] = v.x; w[WORDS * SPAN - 1] = v.y; }
            if (WORDS * SPAN == 4) {
                const uint4 v = *(const uint4*)piece;
                w[0] = v.x; w[1 % (WORDS * SPAN)] = v.y; w[2 % (WORDS * SPAN)] = v.z; w[3 % (WORDS * SPAN)] = v.w;
            }
#else
#pragma unroll
            for (int j = 0; j < WORDS; j++) {
                const u32 low = state[step_of(t, 2 * j) * stride_t + channel_of(t, 2 * j) * stride_d];
                const u32 high = state[step_of(t, 2 * j + 1) * stride_t + channel_of(t, 2 * j + 1) * stride_d];
                w[j] = low | high << 16;
            }
#endif
        }
    };
    const u32 ones = t == 0 ? 0x3f803f80u : t == 1 ? 0x3f80u : 0u;
    u32 x[2][WORDS * SPAN], next[2][WORDS * SPAN];
    if (team < units) load(next, team);
    for (int unit = team; unit < units; unit += WARPGROUPS) {
        const int slot = unit % spans * SPAN, row = first + unit / spans * CHUNK + own_row;
#pragma unroll
        for (int a = 0; a < 2; a++)
#pragma unroll
            for (int j = 0; j < WORDS * SPAN; j++) x[a][j] = next[a][j];
        if (unit + WARPGROUPS < units) load(next, unit + WARPGROUPS);  // while this one is looked up
#pragma unroll 1
        for (int s = 0; s < SPAN; s++) {
            // States as operands, for fp16 as two bf16 numbers.
            u32 operand[PARTS][2][WORDS];
#pragma unroll
            for (int a = 0; a < 2; a++)
#pragma unroll
                for (int j = 0; j < WORDS; j++) {
#if HALF_INPUT
                    const float x0 = from_half(x[a][j] & 0xffff), x1 = from_half(x[a][j] >> 16);
                    operand[0][a][j] = pack(x0, x1);
                    operand[PARTS - 1][a][j] = pack(x0 - low(operand[0][a][j]), x1 - high(operand[0][a][j]));
#else
                    operand[0][a][j] = x[a][j];
#endif
                }
            // Entries as the tensor cores read them: 8 entries of 8 coordinates are 128 bytes, the next 8 entries follow.
            const u64 layout = (u64)(128 >> 4) << 32 | (u64)(HALF_PRODUCT >> 4) << 16;
            const u32 group_at = operands + (slot + s) * (PRODUCTS * PRODUCT);
            auto ask = [&](float (&d)[32], int slice) __attribute__((always_inline)) {
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                auto entries = [&](int product) { return layout | (group_at + product * PRODUCT + slice * (SLICE * 16)) >> 4; };
                multiply(d, ones, ones, 0, 0, entries(PRODUCTS - 1), 0);
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    u32 (&o)[2][WORDS] = operand[part];
#if SIZE == 8
                    multiply(d, o[0][0], o[1][0], o[0][0], o[1][0], entries(0), 1);
#else
#pragma unroll
                    for (int i = 0; i < 2 * HIGHS; i++) {
                        const int j = i % HIGHS * 2;
                        multiply(d, o[0][j], o[1][j], o[0][j + 1], o[1][j + 1], entries(i), 1);
                    }
#endif
                }
                commit();
            };
            Best best[2];
            const float least = __int_as_float(0xff800000), lane_code = (float)(2 * t);
#pragma unroll
            for (int r = 0; r < 2; r++) best[r] = {least, least, least, least, lane_code};
            float d[2][32];
            ask(d[0], 0);
#pragma unroll
            for (int slice = 0; slice < 256 / SLICE; slice++) {
                float (&e)[32] = d[slice % 2];
                if (slice + 1 < 256 / SLICE) { ask(d[(slice + 1) % 2], slice + 1); wait_for<1>(e); }
                else wait_for<0>(e);
#pragma unroll
                for (int i = 0; i < 32; i += 8) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float pair = fmaxf(e[i + 2 * r], e[i + 2 * r + 1]), other = fmaxf(e[i + 4 + 2 * r], e[i + 5 + 2 * r]);
                        keep(best[r], fmaxf(pair, other), pair, e[i + 2 * r], e[i + 4 + 2 * r], lane_code, (float)(slice * SLICE + 2 * i), nothing);
                    }
                }
            }
            // The largest of a row's four lanes. Of each pair of lanes one goes on with the first row, the other with the second.
            float top[2], code[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Best& found = best[r];
                top[r] = found.top;
                code[r] = found.code + (found.top == found.pair ? (found.top == found.first ? 0.0f : 1.0f) : (found.top == found.third ? 8.0f : 9.0f));
            }
            const bool odd = t & 1;
            float mine = odd ? top[1] : top[0], my_code = odd ? code[1] : code[0];
            auto compare = [&](float other, float its) {
                if (other > mine || (other == mine && its < my_code)) { mine = other; my_code = its; }
            };
            compare(__shfl_xor_sync(FULL, odd ? top[0] : top[1], 1), __shfl_xor_sync(FULL, odd ? code[0] : code[1], 1));
            compare(__shfl_xor_sync(FULL, mine, 2), __shfl_xor_sync(FULL, my_code, 2));
            const int token = row + 8 * (t & 1);
            u8* to = codes + blockIdx.z * stride_cs + batch_row * stride_cb + head * stride_ch + (first_group + slot + s) * stride_cg;
            if (t < 2 && token < end) to[(token >> 3) * stride_cp + (token & 7) * stride_cn] = (u8)__float2int_rn(my_code);
            if (SPAN == 2) {
#pragma unroll
                for (int a = 0; a < 2; a++)
#pragma unroll
                    for (int j = 0; j < WORDS; j++) x[a][j] = x[a][(WORDS + j) % (WORDS * SPAN)];
            }
        }
    }
}
