// How soon a record is likely to be used again; see forecast.hpp.

#include "forecast.hpp"

#include <algorithm>
#include <utility>

namespace retain {

namespace {

constexpr unsigned kFirstShift = 5;
constexpr std::uint64_t kEpochsPerCount = 32;
constexpr std::size_t kFirstBuckets = 32;
constexpr std::uint64_t kGhostsPerCount = 3;
constexpr double kRemembered = 0.9995;  // of what was seen, after each epoch: a half after 43 turnovers

// What is believed before anything was seen: the longer unused, the less likely, which is LRU. It weighs as much as 100
// records that were watched for an epoch.
constexpr double kPriorUses = 0.3;
constexpr double kPriorEpochs = 4.0;
constexpr double kPriorWeight = 100.0;

unsigned log2_of(std::uint64_t value) {
    unsigned found = 0;
    while (value >>= 1) {
        ++found;
    }
    return found;
}

}  // namespace

std::uint8_t kind_of(std::uint8_t uses) {
    if (uses < 3) {
        return uses;
    }
    return uses < 6 ? 3 : uses < 16 ? 4 : 5;
}

Forecast::Forecast() : waiting_(kKinds * kEpochs), shift_(kFirstShift) {
    for (Ages& values : values_) {
        values.fill(-1.0);
    }
}

void Forecast::advance(std::uint64_t now, std::uint64_t count) {
    while (count / kEpochsPerCount >= std::uint64_t{2} << shift_) {
        widen();
    }
    while (epoch_ < now >> shift_) {
        turn();
    }
}

void Forecast::wait(std::uint8_t kind, std::uint64_t tick) { ++*waiting(kind, tick); }

void Forecast::used(std::uint8_t kind, std::uint64_t tick) {
    if (lost(kind, tick)) {
        recent_uses_[kind][age_class(age(tick >> shift_))] += 1.0;
    }
}

bool Forecast::lost(std::uint8_t kind, std::uint64_t tick) {
    std::uint32_t* const found = waiting(kind, tick);
    // Waits of before the epochs that are watched are not counted, and are none of a wider epoch's either.
    if (found == nullptr || *found == 0) {
        return false;
    }
    --*found;
    return true;
}

double Forecast::value(std::uint8_t kind, std::uint64_t tick) const {
    const std::size_t from = age_class(age(tick >> shift_));
    double& value = values_[kind][from];
    if (value < 0.0) {
        const double epoch = static_cast<double>(std::uint64_t{1} << shift_);
        const std::size_t last = age_class(kEpochs << shift_);
        double left = 1.0, gained = 0.0, spent = 0.0, start = 0.0;
        value = 0.0;
        for (std::size_t i = 0; i < from; ++i) {
            start += width(i);
        }
        for (std::size_t i = from; i <= last; ++i) {
            const double ticks = width(i), middle = start + 0.5 * ticks;
            const double prior = kPriorUses / (middle + kPriorEpochs * epoch);
            const double weight = kPriorWeight * epoch;
            const double rate = (uses_[kind][i] + weight * prior) / (watched_[kind][i] + weight);
            const double remaining = left / (1.0 + rate * ticks);
            gained += left - remaining;
            spent += 0.5 * (left + remaining) * ticks;
            value = std::max(value, gained / spent);
            left = remaining;
            start += ticks;
        }
    }
    return value;
}

// Ages 0 to 3 are classes of their own; above, each octave has four.
std::size_t Forecast::age_class(std::uint64_t age) {
    if (age < 4) {
        return static_cast<std::size_t>(age);
    }
    const unsigned octave = log2_of(age);
    return 4 * (octave - 1) + static_cast<std::size_t>((age >> (octave - 2)) & 3);
}

double Forecast::width(std::size_t age_class) {
    return age_class < 4 ? 1.0 : static_cast<double>(std::uint64_t{1} << (age_class / 4 - 1));
}

// From the middle of an epoch to the middle of this one; within this one, half an epoch.
std::uint64_t Forecast::age(std::uint64_t epoch) const {
    const std::uint64_t epochs = std::min<std::uint64_t>(epoch_ - epoch, kEpochs);
    return epochs == 0 ? (std::uint64_t{1} << shift_) / 2 : epochs << shift_;
}

std::uint32_t* Forecast::waiting(std::uint8_t kind, std::uint64_t tick) {
    const std::uint64_t epoch = tick >> shift_;
    return epoch_ - epoch >= kEpochs ? nullptr : &waiting_[kind * kEpochs + epoch % kEpochs];
}

void Forecast::turn() {
    const double epoch = static_cast<double>(std::uint64_t{1} << shift_);
    const std::uint64_t known = std::min<std::uint64_t>(epoch_ + 1, kEpochs);
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
        for (std::size_t i = 0; i < kAges; ++i) {
            uses_[kind][i] = uses_[kind][i] * kRemembered + recent_uses_[kind][i];
            watched_[kind][i] *= kRemembered;
        }
        for (std::uint64_t past = 0; past < known; ++past) {
            const std::uint64_t count = waiting_[kind * kEpochs + (epoch_ - past) % kEpochs];
            if (count > 0) {
                watched_[kind][age_class(age(epoch_ - past))] += static_cast<double>(count) * epoch;
            }
        }
        recent_uses_[kind].fill(0.0);
        values_[kind].fill(-1.0);
    }
    ++epoch_;
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
        waiting_[kind * kEpochs + epoch_ % kEpochs] = 0;
    }
}

// Two epochs become one.
void Forecast::widen() {
    const std::uint64_t known = std::min<std::uint64_t>(epoch_ + 1, kEpochs);
    std::vector<std::uint32_t> merged(waiting_.size());
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
        for (std::uint64_t past = 0; past < known; ++past) {
            const std::uint64_t epoch = epoch_ - past;
            merged[kind * kEpochs + epoch / 2 % kEpochs] += waiting_[kind * kEpochs + epoch % kEpochs];
        }
        values_[kind].fill(-1.0);
    }
    waiting_.swap(merged);
    epoch_ /= 2;
    ++shift_;
}

Ghosts::Ghosts() : low_(kFirstBuckets) {
    for (std::size_t i = 0; i < kFirstBuckets; ++i) {
        buckets_.push_back(Bucket{});
    }
}

Ghosts::Packed Ghosts::Packed::from(const Ghost& ghost) {
    const std::uint64_t steps = ghost.tick >> kFirstShift;
    return {{static_cast<std::uint32_t>(ghost.name), static_cast<std::uint32_t>(ghost.name >> 32 | (steps & 0xFFFFu) << 16),
             static_cast<std::uint32_t>(steps >> 16) | std::uint32_t{ghost.uses} << 24}};
}

Ghosts::Ghost Ghosts::Packed::ghost() const {
    return {name(), steps() << kFirstShift, static_cast<std::uint8_t>(words[2] >> 24)};
}

Ghosts::Ghost Ghosts::put(const Ghost& ghost, std::uint64_t count) {
    if (buckets_.size() * kWays < kGhostsPerCount * count) {
        split();
    }
    Bucket& entries = bucket(ghost.name);
    const auto oldest = std::min_element(entries.begin(), entries.end(), [](const Packed& a, const Packed& b) {
        return std::pair(a.name() != 0, a.steps()) < std::pair(b.name() != 0, b.steps());
    });
    return std::exchange(*oldest, Packed::from(ghost)).ghost();
}

Ghosts::Ghost Ghosts::take(std::uint64_t name) {
    for (Packed& entry : bucket(name)) {
        if (entry.name() == name) {
            return std::exchange(entry, Packed{}).ghost();
        }
    }
    return Ghost{};
}

Ghosts::Bucket& Ghosts::bucket(std::uint64_t name) {
    const std::size_t wide = name & (2 * low_ - 1);
    return buckets_[wide < buckets_.size() ? wide : name & (low_ - 1)];
}

void Ghosts::split() {
    const std::size_t added = buckets_.size();
    Bucket& keep = buckets_[added - low_];
    Bucket moved{};
    for (std::size_t i = 0; i < kWays; ++i) {
        if (keep[i].name() != 0 && (keep[i].name() & (2 * low_ - 1)) == added) {
            moved[i] = std::exchange(keep[i], Packed{});
        }
    }
    buckets_.push_back(moved);
    if (buckets_.size() == 2 * low_) {
        low_ *= 2;
    }
}

}  // namespace retain
