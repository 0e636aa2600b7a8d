// What Python hands to the kernel; kernel_library.py has the same structures.
#pragma once
#include <cstdint>

constexpr int64_t GROUP = 32, BLOCK = 16, CHUNK = 64, MAX_ROWS = 64;  // weights; tokens; tokens; rows of one pass

// A weight matrix in the order in which it is read: tiles of LANES output rows, in them groups of 32 columns, in them
// four columns of each row side by side.
//   4 bits: codes [tiles][groups][4][LANES][4], a group's columns 0-15 in the low nibbles and 16-31 in the high ones;
//           FP16 scales [tiles][groups][2][LANES], a scale and a minimum; weight = scale * code + minimum
//   8 bits: codes [tiles][groups][8][LANES][4]; scales [tiles][groups][LANES]; weight = scale * (code - 128)
struct Matrix {
    const uint8_t* codes;
    const uint16_t* scales;
    const float* bias;  // [rows], or null
    int64_t rows, columns, bits;
};

// A slab is a block of one layer and KV head. Keys lie in it as [head_dim][16 tokens], values as [16 tokens][head_dim]:
// vectors run over tokens for the scores and over channels for the mixture, and neither is summed across a vector.
struct Cache {
    void *keys, *values;               // [layers][blocks][kv_heads] slabs of FP16 or INT8
    float *key_scales, *value_scales;  // INT8: [..][16 tokens], what a token's codes are multiplied by; FP16: null
    int64_t blocks;
};

struct Layer {
    const float *attention_norm, *ffn_norm;  // [hidden]
    Matrix qkv, output, gate_up, down;       // gate_up: tiles of gate and of up in turn
};

struct Model {
    int64_t layers, hidden, heads, kv_heads, head_dim, vocab, positions, outputs;  // outputs: rows of the head
    double eps;
    const float *embedding, *cosines, *sines, *norm;  // [vocab, hidden], [positions, head_dim] twice, [hidden]
    const float *token_norm, *feature_norm;           // of a conditioned draft, which has `join`; else null
    const Layer* layer;
    Matrix head, join;
};

struct Pass {
    int64_t rows, wanted_rows, table_width, threads, two_digits;
    const int64_t *tokens, *positions, *tables, *wanted;  // [rows], [rows], [rows, table_width], [wanted_rows]
    const float* given;                                   // features [rows, hidden] for `join`; else null
    float *features, *logits, *scratch;                   // [rows, hidden], [wanted_rows, outputs], zeros at first
};

enum Error : int64_t { NONE, TOKEN, POSITION, TABLE, TWICE, NOT_FINITE };
