// The allocator of the memory arena; see arena.hpp.

#include "arena.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace retain {

namespace {

// Idle ranges that are looked at for one place where none is large enough alone. With 16 of them, sizes of 4 KiB to 32 MiB
// at random find between two thirds and nine tenths of their memory idle in a full arena.
constexpr int kLooks = 16;

}  // namespace

Arena::Arena(std::uint64_t capacity, std::uint64_t span) : capacity_(capacity / kPage * kPage), span_(span / kPage * kPage) {
    if (span < capacity) {
        throw std::invalid_argument("an arena's span must be at least its capacity");
    }
    if (span_ > 0) {
        free_.add(0, span_);
    }
}

std::optional<Taken> Arena::take(std::uint64_t size) {
    if (size == 0) {
        throw std::invalid_argument("an arena has no place of 0 bytes");
    }
    if (size > capacity_ - used_) {
        return std::nullopt;
    }
    size = (size + kPage - 1) / kPage * kPage;  // still no more than is left: that is whole pages
    const auto offset = choose(size);
    if (!offset) {
        return std::nullopt;
    }
    free_.remove(*offset, size);
    idle_bytes_ -= idle_.remove(*offset, size);
    used_ += size;
    taken_.emplace(*offset, size);
    return Taken{*offset, give_back()};
}

std::uint64_t Arena::give(std::uint64_t offset) {
    const auto found = taken_.find(offset);
    if (found == taken_.end()) {
        throw std::out_of_range("nothing was taken at offset " + std::to_string(offset));
    }
    const std::uint64_t size = found->second;
    taken_.erase(found);
    used_ -= size;
    idle_bytes_ += size;
    free_.add(offset, size);
    idle_.add(offset, size);
    return size;
}

std::optional<std::uint64_t> Arena::fresh(std::uint64_t size) {
    if (size == 0) {
        throw std::invalid_argument("an arena has no place of 0 bytes");
    }
    if (size > capacity_ - used_ || idle_bytes_ > capacity_ - used_ - size || free_.by_offset.empty()) {
        return std::nullopt;
    }
    size = (size + kPage - 1) / kPage * kPage;
    // Behind all that holds memory: what lies idle of the last free range lies at its low end, or higher up.
    const auto [start, room] = *std::prev(free_.by_offset.end());
    std::uint64_t offset = start;
    if (!idle_.by_offset.empty()) {
        const auto [last, length] = *std::prev(idle_.by_offset.end());
        offset = std::max(offset, last + length);
    }
    if (size > start + room - offset) {
        return std::nullopt;
    }
    free_.remove(offset, size);
    used_ += size;
    taken_.emplace(offset, size);
    return offset;
}

std::optional<std::uint64_t> Arena::choose(std::uint64_t size) const {
    const auto idle = idle_.by_size.lower_bound({size, 0});
    if (idle != idle_.by_size.end()) {
        return idle->second;
    }
    const auto fit = free_.by_size.lower_bound({size, 0});
    if (fit == free_.by_size.end()) {
        return std::nullopt;
    }
    std::uint64_t best = fit->second, most = idle_.covered(best, size), extent = fit->first;
    int looks = kLooks;
    for (auto each = idle_.by_size.rbegin(); each != idle_.by_size.rend() && looks > 0; ++each, --looks) {
        const auto [start, room] = free_.around(each->second);
        if (room < size) {
            continue;
        }
        // The place begins or ends with the idle range, as far as its surroundings let it.
        const std::uint64_t last = start + room - size, end = each->second + each->first;
        for (const std::uint64_t place : {std::min(each->second, last), std::max(end, start + size) - size}) {
            const std::uint64_t covered = idle_.covered(place, size);
            if (covered > most || (covered == most && room < extent)) {
                best = place, most = covered, extent = room;
            }
        }
    }
    return best;
}

// Idle memory beyond what the capacity allows, from the top, so that memory gathers at low offsets.
std::vector<Range> Arena::give_back() {
    std::vector<Range> back;
    while (used_ + idle_bytes_ > capacity_) {
        const auto [offset, size] = *std::prev(idle_.by_offset.end());
        const std::uint64_t part = std::min(size, used_ + idle_bytes_ - capacity_);
        back.emplace_back(offset + size - part, part);
        idle_.remove(offset + size - part, part);
        idle_bytes_ -= part;
    }
    return back;
}

void Arena::Ranges::add(std::uint64_t offset, std::uint64_t size) {
    auto next = by_offset.lower_bound(offset);
    if (next != by_offset.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            offset = previous->first;
            size += previous->second;
            erase(previous);
        }
    }
    if (next != by_offset.end() && next->first == offset + size) {
        size += next->second;
        erase(next);
    }
    insert(offset, size);
}

// Take [offset, offset + size) out, however many ranges it touches; returns how many bytes of it there were.
std::uint64_t Arena::Ranges::remove(std::uint64_t offset, std::uint64_t size) {
    const std::uint64_t end = offset + size;
    std::uint64_t removed = 0;
    for (auto range = first_reaching(offset); range != by_offset.end() && range->first < end;) {
        const std::uint64_t low = range->first, high = low + range->second;
        const auto gone = range++;
        erase(by_offset.find(gone->first));
        if (low < offset) {
            insert(low, offset - low);
        }
        if (high > end) {
            insert(end, high - end);
        }
        removed += std::min(high, end) - std::max(low, offset);
    }
    return removed;
}

std::uint64_t Arena::Ranges::covered(std::uint64_t offset, std::uint64_t size) const {
    const std::uint64_t end = offset + size;
    std::uint64_t bytes = 0;
    for (auto range = first_reaching(offset); range != by_offset.end() && range->first < end; ++range) {
        bytes += std::min(range->first + range->second, end) - std::max(range->first, offset);
    }
    return bytes;
}

// The range that `offset` lies in.
Range Arena::Ranges::around(std::uint64_t offset) const { return *first_reaching(offset); }

std::map<std::uint64_t, std::uint64_t>::const_iterator Arena::Ranges::first_reaching(std::uint64_t offset) const {
    auto range = by_offset.upper_bound(offset);
    if (range != by_offset.begin()) {
        const auto previous = std::prev(range);
        if (previous->first + previous->second > offset) {
            return previous;
        }
    }
    return range;
}

void Arena::Ranges::insert(std::uint64_t offset, std::uint64_t size) {
    by_offset.emplace(offset, size);
    by_size.emplace(size, offset);
}

void Arena::Ranges::erase(std::map<std::uint64_t, std::uint64_t>::iterator range) {
    by_size.erase({range->second, range->first});
    by_offset.erase(range);
}

}  // namespace retain
