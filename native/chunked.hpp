// A vector that never moves what it holds.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace retain {

// A vector that grows by chunks: elements never move, and at most one chunk is spare.
template <typename T, std::size_t kBits = 12>
class Chunked {
  public:
    static constexpr std::size_t kChunk = std::size_t{1} << kBits;

    T& operator[](std::size_t i) { return chunks_[i >> kBits][i & (kChunk - 1)]; }
    const T& operator[](std::size_t i) const { return chunks_[i >> kBits][i & (kChunk - 1)]; }
    std::size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }

    void push_back(const T& value) {
        if (size_ == chunks_.size() * kChunk) {
            chunks_.push_back(std::make_unique<T[]>(kChunk));
        }
        (*this)[size_] = value;
        ++size_;
    }
    void pop_back() {
        --size_;
        if (chunks_.size() * kChunk >= size_ + 2 * kChunk) {
            chunks_.pop_back();
        }
    }
    std::size_t nbytes() const { return chunks_.size() * kChunk * sizeof(T) + chunks_.capacity() * sizeof(void*); }

  private:
    std::vector<std::unique_ptr<T[]>> chunks_;
    std::size_t size_ = 0;
};

}  // namespace retain
