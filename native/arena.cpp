// The allocator of the memory arena; see arena.hpp.

#include "arena.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace retain {

namespace {

// Insert [offset, offset + size) into disjoint ranges, joined with those that touch it; returns the joined range.
Range join(std::map<std::uint64_t, std::uint64_t>& ranges, std::uint64_t offset, std::uint64_t size) {
    auto next = ranges.lower_bound(offset);
    if (next != ranges.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            offset = previous->first;
            size += previous->second;
            ranges.erase(previous);
        }
    }
    if (next != ranges.end() && offset + size == next->first) {
        size += next->second;
        ranges.erase(next);
    }
    ranges.emplace(offset, size);
    return {offset, size};
}

}  // namespace

Arena::Arena(std::uint64_t capacity, std::uint64_t span) : capacity_(capacity / kPage * kPage), span_(span / kPage * kPage) {
    if (span < capacity) {
        throw std::invalid_argument("an arena's span must be at least its capacity");
    }
    if (span_ > 0) {
        add_free(0, span_);
    }
}

std::optional<Taken> Arena::take(std::uint64_t size) {
    if (size == 0) {
        throw std::invalid_argument("an arena has no place of 0 bytes");
    }
    if (size > capacity_ - used_) {
        return std::nullopt;
    }
    size = (size + kPage - 1) / kPage * kPage;
    const auto fit = sizes_.lower_bound({size, 0});
    if (size > capacity_ - used_ || fit == sizes_.end()) {
        return std::nullopt;
    }
    const auto [found, offset] = *fit;
    sizes_.erase(fit);
    free_.erase(offset);
    if (found > size) {
        add_free(offset + size, found - size);
    }
    idle_bytes_ -= remove_idle(offset, size);
    used_ += size;
    taken_.emplace(offset, size);

    Taken taken{offset, {}};
    while (used_ + idle_bytes_ > capacity_) {
        // From the top, so that memory gathers at low offsets.
        const auto last = std::prev(idle_.end());
        const std::uint64_t back = std::min(last->second, used_ + idle_bytes_ - capacity_);
        taken.idle.emplace_back(last->first + last->second - back, back);
        idle_bytes_ -= back;
        last->second -= back;
        if (last->second == 0) {
            idle_.erase(last);
        }
    }
    return taken;
}

std::uint64_t Arena::give(std::uint64_t offset) {
    const auto found = taken_.find(offset);
    if (found == taken_.end()) {
        throw std::out_of_range("nothing was taken at offset " + std::to_string(offset));
    }
    const std::uint64_t size = found->second;
    taken_.erase(found);
    used_ -= size;
    add_free(offset, size);
    add_idle(offset, size);
    return size;
}

void Arena::populated(std::uint64_t size) {
    if (used_ != 0 || idle_bytes_ != 0 || size > capacity_) {
        throw std::invalid_argument("only an untouched arena can be populated, up to its capacity");
    }
    if (size >= kPage) {
        add_idle(0, size / kPage * kPage);
    }
}

void Arena::add_free(std::uint64_t offset, std::uint64_t size) {
    const auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + size) {
        sizes_.erase({next->second, next->first});
    }
    if (next != free_.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            sizes_.erase({previous->second, previous->first});
        }
    }
    const Range joined = join(free_, offset, size);
    sizes_.emplace(joined.second, joined.first);
}

void Arena::add_idle(std::uint64_t offset, std::uint64_t size) {
    join(idle_, offset, size);
    idle_bytes_ += size;
}

std::uint64_t Arena::remove_idle(std::uint64_t offset, std::uint64_t size) {
    const std::uint64_t end = offset + size;
    std::uint64_t removed = 0;
    auto range = idle_.upper_bound(offset);
    if (range != idle_.begin()) {
        --range;
    }
    while (range != idle_.end() && range->first < end) {
        const std::uint64_t low = range->first, high = low + range->second;
        if (high <= offset) {
            ++range;
            continue;
        }
        range = idle_.erase(range);
        if (low < offset) {
            idle_.emplace(low, offset - low);
        }
        if (high > end) {
            range = idle_.emplace(end, high - end).first;
        }
        removed += std::min(high, end) - std::max(low, offset);
        if (high > end) {
            break;
        }
    }
    return removed;
}

}  // namespace retain
