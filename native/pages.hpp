// Copies between an engine's paged KV cache and canonical blocks, in one pass and without looking at the numbers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace retain {

// Where the K, or the V, of some layers lies in the pages of an engine. Strides are in bytes.
struct PageLayout {
    std::vector<std::uintptr_t> bases;  // one a layer: the address of its page 0, head 0, token 0, dimension 0
    std::vector<std::size_t> rows;      // the layer's row in the canonical array
    std::size_t pages;
    std::size_t page_tokens;
    std::size_t heads;
    std::size_t dim;
    std::size_t item;  // bytes of a number: 1, 2 or 4
    std::ptrdiff_t page_stride;
    std::ptrdiff_t head_stride;
    std::ptrdiff_t token_stride;
    std::ptrdiff_t dim_stride;
    bool pairs;  // numbers h * dim / 2 + i of a head are its numbers 2 * i + h in a page; dim_stride is item then
};

// A canonical array [layers, heads, tokens, dim]; the last two axes lie together. Strides are in bytes.
struct Canonical {
    char* data;
    std::ptrdiff_t row_stride;
    std::ptrdiff_t head_stride;
};

// Which tokens: `count` of them, from token `first` of the pages in `table` and token `start` of the array.
struct TokenRange {
    const std::int64_t* table;
    std::size_t first;
    std::size_t start;
    std::size_t count;
};

// From pages into the array. Everything has been checked against the layout.
void gather(const PageLayout& layout, const Canonical& array, const TokenRange& range);

// From the array into pages.
void scatter(const PageLayout& layout, const Canonical& array, const TokenRange& range);

}  // namespace retain
