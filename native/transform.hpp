// Between a block's arrays and the components of a part: rotary positions, means, weights, steps and classes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace retain::transform {

constexpr std::size_t kLargestHead = 1 << 12;  // dimensions

enum class Kind { kFloat32, kFloat16, kBfloat16 };

// One head's rows in a block: `tokens` rows of `dim` numbers, `stride` numbers apart.
struct Head {
    void* data;
    Kind kind;
    std::ptrdiff_t stride;
    std::size_t tokens, dim;
};

// The angles of a head's rotation, [tokens][pairs]: which dimensions turn, and how they pair.
struct Angles {
    const float* cosine;
    const float* sine;
    std::size_t pairs;  // 0 where nothing turns
    bool interleaved;
};

// rows[t * stride + i] = (turned(head[t])[i] - mean[i]) * weight[i].
void gather(const Head& head, const Angles& angles, const float* mean, const float* weight, float* rows,
            std::size_t stride);

// The inverse: head[t] = turned(rows[t] * inverse + mean), rounded to the nearest finite number of its kind.
void scatter(const Head& head, const Angles& angles, const float* mean, const float* inverse, const float* rows,
             std::size_t stride);

// out[t] = the dot product of the turned head[t] with `probe`, and norm[t] its length.
void project(const Head& head, const Angles& angles, const float* probe, float* out, float* norm);

// numbers[t] = values[t] * scale[t], rounded to the nearest; gives the largest magnitude, not finite where one is.
float quantise(const float* values, const float* scale, std::size_t tokens, std::int16_t* numbers);

// The sum over t of |values[t]| * share[t].
float loudness(const float* values, const float* share, std::size_t tokens);

// sums[t] += |values[t]| * factor.
void add_sizes(const float* values, float factor, std::size_t tokens, float* sums);

// values[t] = numbers[t] * scale[t], and whether any number is not zero.
bool restore(const std::int16_t* numbers, const float* scale, std::size_t tokens, float* values);

}  // namespace retain::transform
