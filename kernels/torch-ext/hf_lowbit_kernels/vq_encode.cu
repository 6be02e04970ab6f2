// Nearest codebook entry (LoopVQ) for sm_90. vq_encode_reference.py is the specification.
//
// A block takes GROUPS neighbouring groups of one head and a range of tokens. It multiplies the entries by the metric once,
// in fp32, and keeps each product as the sum of two numbers of the states' 16-bit type, hi + lo, as operands of tensor core
// products lie in registers. A warp then takes 16 * TILES tokens of a group: states as they lie in memory, products with hi
// and lo summed in fp32 on top of minus the norms.
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
// Compiled by NVRTC without headers. Macros: STEPS, CHANNELS (their product is 8, 16 or 32), HALF_INPUT (states are fp16,
// else bf16), WEIGHTED (there is a metric), VECTOR (pieces, of tables too, are contiguous and aligned), PAGED (keys and values of
// a chunk and of the window before it, a tensor for each step; else one tensor of vectors), TILES, WARPS, UNROLL (of the loop
// over tiles).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct Side {  // keys, or values
    const u16 *tables;
    const float *half_norms, *metric;
    const u16 *states[4], *window;  // states: of each step (PAGED), or all of them
};
struct Sides { Side of[2]; };

#define SIZE (STEPS * CHANNELS)
#define PIECE (SIZE / 4)           // coordinates of a lane
#define WORDS (SIZE / 8)           // the same in 32-bit words
#define DEPTH (SIZE == 32 ? 2 : 1) // products of 16 coordinates, for hi and for lo
#define GROUPS (64 / SIZE)         // of a block; its tables take 64 KB
#define SPAN (VECTOR && STEPS == 4 && CHANNELS == 4 ? 2 : 1)  // neighbouring groups that a lane loads at once, 16 bytes
#define CHUNK (16 * TILES)         // tokens of a warp
#define THREADS (32 * WARPS)
#define FULL 0xffffffffu
constexpr int unroll_by = UNROLL;  // pragmas do not expand macros

#if SIZE == 8
typedef uint2 Fragment;  // hi, lo
#else
typedef uint4 Fragment;  // hi and hi, lo and lo of coordinates 0, 1 and 2, 3 of a lane
#endif
// Shared memory: fragments [GROUPS][32 tiles of 8 entries][DEPTH][32 lanes], minus norms [GROUPS][32 tiles][4].
#define FRAGMENTS (GROUPS * 32 * DEPTH * 32)
#define NORMS (GROUPS * 32 * 4)

__device__ __forceinline__ float from_half(u16 x) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f; }
// Two numbers of the states' type in a word, the first one in the low half.
__device__ __forceinline__ u32 pack(float a, float b) {
    u32 d;
#if HALF_INPUT
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
#endif
    return d;
}
__device__ __forceinline__ float number(u32 bits) {
#if HALF_INPUT
    return from_half((u16)bits);
#else
    return __uint_as_float(bits << 16);
#endif
}
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3) {
#if HALF_INPUT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#endif
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}

// Best four scores so far: the largest, the larger of the first two, the first, the third, and the first one's code.
struct Best { float top, pair, first, third, code; };

// `nothing` is -0, from the host, so that the compiler cannot know: sums with it are copies that do not use the comparisons' unit.
__device__ __forceinline__ void keep(Best& best, float top, float pair, float first, float third, float code, float nothing) {
    asm("{.reg .pred p; setp.gt.f32 p, %5, %0;\n"
        "@p add.rn.f32 %0, %5, %10; @p add.rn.f32 %1, %6, %10; @p add.rn.f32 %2, %7, %10; @p add.rn.f32 %3, %8, %10; @p add.rn.f32 %4, %9, %10;}"
        : "+f"(best.top), "+f"(best.pair), "+f"(best.first), "+f"(best.third), "+f"(best.code)
        : "f"(top), "f"(pair), "f"(first), "f"(third), "f"(code), "f"(nothing));
}

// Coordinate j of lane t.
__device__ __forceinline__ int step_of(int t, int j) { return (t * PIECE + j) / CHANNELS; }
__device__ __forceinline__ int channel_of(int t, int j) { return (t * PIECE + j) % CHANNELS; }

// Entries times metric of one group: those of lane `lane` in tile `tile`.
__device__ __forceinline__ void weighted(float (&p)[PIECE], const u16* tables, const float* metric, int head, int heads, int group, int groups, int tile, int lane) {
    const int entry = 8 * tile + lane / 4, t = lane % 4;
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

__device__ __forceinline__ void scores(float (&d)[4], const u32 (&x)[2 * WORDS], const Fragment* b, const float4& c) {
#if SIZE == 8
    multiply(d, x[0], x[1], x[0], x[1], b[0].x, b[0].y, c.x, c.y, c.z, c.w);
#else
    multiply(d, x[0], x[1], x[2], x[3], b[0].x, b[0].y, c.x, c.y, c.z, c.w);
    multiply(d, x[0], x[1], x[2], x[3], b[0].z, b[0].w, d[0], d[1], d[2], d[3]);
#endif
#if SIZE == 32
    multiply(d, x[4], x[5], x[6], x[7], b[1].x, b[1].y, d[0], d[1], d[2], d[3]);
    multiply(d, x[4], x[5], x[6], x[7], b[1].z, b[1].w, d[0], d[1], d[2], d[3]);
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
    extern __shared__ __align__(16) u8 shared[];
    Fragment* fragments = (Fragment*)shared;
    float4* norms = (float4*)(fragments + FRAGMENTS);
    const int blocks = (groups + GROUPS - 1) / GROUPS;
    const int head = blockIdx.x / blocks, first_group = blockIdx.x % blocks * GROUPS;
    const int live = min(GROUPS, groups - first_group);
    const u32 zero = (u32)tokens >> 31;  // which the compiler cannot know
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, t = lane % 4;

#if HALF_INPUT
    // A power of two brings the largest product of a group to 2^13 or more, below 2^14: fp16 holds neither large nor tiny ones.
    __shared__ int peaks[GROUPS];
    if (thread < GROUPS) peaks[thread] = 0;
    __syncthreads();
    for (int i = thread; i < live * 1024; i += THREADS) {
        float p[PIECE], peak = 0;
        weighted(p, tables, metric, head, heads, first_group + i / 1024, groups, i / 32 % 32, lane);
#pragma unroll
        for (int j = 0; j < PIECE; j++) peak = fmaxf(peak, fabsf(p[j]));
        atomicMax(&peaks[i / 1024], __float_as_int(peak));
    }
    __syncthreads();
#endif
    for (int i = thread; i < live * 1024; i += THREADS) {
        const int tile = i / 32 % 32, slot = i / 1024;
        float p[PIECE], scale = 1;
        weighted(p, tables, metric, head, heads, first_group + slot, groups, tile, lane);
#if HALF_INPUT
        scale = __int_as_float(min(max(267 - (peaks[slot] >> 23), 1), 254) << 23);
#endif
        u32 hi[WORDS], lo[WORDS];
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            const float a = p[2 * j] * scale, b = p[2 * j + 1] * scale;
            hi[j] = pack(a, b);
            lo[j] = pack(a - number(hi[j] & 0xffff), b - number(hi[j] >> 16));
        }
        Fragment* to = fragments + (slot * 32 + tile) * DEPTH * 32 + lane;
#if SIZE == 8
        to[0] = make_uint2(hi[0], lo[0]);
#else
        to[0] = make_uint4(hi[0], hi[1], lo[0], lo[1]);
#endif
#if SIZE == 32
        to[32] = make_uint4(hi[2], hi[3], lo[2], lo[3]);
#endif
        if (lane < 4) {
            const float* n = half_norms + ((i64)head * groups + first_group + slot) * 256 + 8 * tile + 2 * lane;
            const float n0 = -scale * n[0], n1 = -scale * n[1];
            norms[(slot * 32 + tile) * 4 + lane] = make_float4(n0, n1, n0, n1);
        }
    }
    __syncthreads();

#if PAGED
    const int batch_row = blockIdx.y / blocks_per_row, first = blockIdx.y % blocks_per_row * tokens_per_block;
#else
    const int batch_row = 0, first = blockIdx.y * tokens_per_block;
#endif
    const int end = min(first + tokens_per_block, tokens);
    const int spans = (live + SPAN - 1) / SPAN, units = (end - first + CHUNK - 1) / CHUNK * spans;
    // The states of a unit: rows 8 * i + lane / 4 of each tile.
    auto load = [&](u32 (&x)[TILES][2][WORDS * SPAN], int unit) {
        const int row = first + unit / spans * CHUNK + lane / 4, at_channel = (first_group + unit % spans * SPAN) * CHANNELS;
#pragma unroll
        for (int a = 0; a < 2 * TILES; a++) {
            const int token = min(row + 8 * a, end - 1);
            u32 (&w)[WORDS * SPAN] = x[a / 2][a % 2];
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
    u32 x[TILES][2][WORDS * SPAN], next[TILES][2][WORDS * SPAN];
    if (warp < units) load(next, warp);
    for (int unit = warp; unit < units; unit += WARPS) {
        const int slot = unit % spans * SPAN, row = first + unit / spans * CHUNK + lane / 4;
#pragma unroll
        for (int a = 0; a < 2 * TILES; a++)
#pragma unroll
            for (int j = 0; j < WORDS * SPAN; j++) x[a / 2][a % 2][j] = next[a / 2][a % 2][j];
        if (unit + WARPS < units) load(next, unit + WARPS);  // while this one is looked up
#pragma unroll 1
        for (int s = 0; s < SPAN; s++) {
            Best best[TILES][2];
#pragma unroll
            for (int a = 0; a < 2 * TILES; a++) {
                const float least = __int_as_float(0xff800000);
                best[a / 2][a % 2] = {least, least, least, least, (float)(2 * t)};
            }
            const Fragment* b = fragments + (slot + s) * 32 * DEPTH * 32 + lane;
            const float4* c = norms + (slot + s) * 32 * 4 + t;
            float code = (float)(2 * t);
            u32 operand[TILES][2 * WORDS];
#pragma unroll
            for (int a = 0; a < 2 * TILES; a++)
#pragma unroll
                for (int j = 0; j < WORDS; j++) operand[a / 2][2 * j + a % 2] = x[a / 2][a % 2][j] ^ zero;
#pragma unroll unroll_by
            for (int tile = 0; tile < 32; tile += 2) {
                Fragment f0[DEPTH], f1[DEPTH];
#pragma unroll
                for (int j = 0; j < DEPTH; j++) { f0[j] = b[32 * j]; f1[j] = b[32 * (DEPTH + j)]; }
                const float4 c0 = c[0], c1 = c[4];
#pragma unroll
                for (int a = 0; a < TILES; a++) {
                    float d[4], e[4];
                    scores(d, operand[a], f0, c0);
                    scores(e, operand[a], f1, c1);
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float pair = fmaxf(d[2 * r], d[2 * r + 1]), other = fmaxf(e[2 * r], e[2 * r + 1]);
                        keep(best[a][r], fmaxf(pair, other), pair, d[2 * r], e[2 * r], code, nothing);
                    }
                }
                b += 64 * DEPTH;
                c += 8;
                code += 16;
            }
            // The largest of a row's four lanes. Lane t ends up with the rows of every fourth set of eight, from t on: each
            // exchange halves what a lane still holds.
            u8* to = codes + blockIdx.z * stride_cs + batch_row * stride_cb + head * stride_ch + (first_group + slot + s) * stride_cg + (row & 7) * stride_cn;
#pragma unroll
            for (int four = 0; four < 2 * TILES; four += 4) {
                float top[4], code[4];
#pragma unroll
                for (int a = 0; a < 4; a++) {
                    const Best& found = best[(four + a) / 2][a % 2];
                    top[a] = found.top;
                    code[a] = found.code + (found.top == found.pair ? (found.top == found.first ? 0.0f : 1.0f) : (found.top == found.third ? 8.0f : 9.0f));
                }
#pragma unroll
                for (int mask = 1, held = 2; mask < 4; mask *= 2, held /= 2) {
                    const bool odd = t & mask;
#pragma unroll
                    for (int a = 0; a < held; a++) {
                        // Sets 2 a and 2 a + 1 of those held: this lane keeps the one that its bit says.
                        const float mine = odd ? top[2 * a + 1] : top[2 * a], my_code = odd ? code[2 * a + 1] : code[2 * a];
                        const float other = __shfl_xor_sync(FULL, odd ? top[2 * a] : top[2 * a + 1], mask);
                        const float its = __shfl_xor_sync(FULL, odd ? code[2 * a] : code[2 * a + 1], mask);
                        const bool better = other > mine || (other == mine && its < my_code);
                        top[a] = better ? other : mine;
                        code[a] = better ? its : my_code;
                    }
                }
                const int token = row + 8 * (four + t);
                if (token < end) to[(token >> 3) * stride_cp] = (u8)__float2int_rn(code[0]);
            }
            if (SPAN == 2) {
#pragma unroll
                for (int a = 0; a < 2 * TILES; a++)
#pragma unroll
                    for (int j = 0; j < WORDS; j++) x[a / 2][a % 2][j] = x[a / 2][a % 2][(WORDS + j) % (WORDS * SPAN)];
            }
        }
    }
}
