//! Ticks of a schedule: which one a time belongs to, and the id of its task.

use std::time::Duration;

use taskonce_core::key::Name;
use taskonce_core::record::WallTime;

const SECOND: u64 = 1000;
const DAY: u64 = 86_400 * SECOND;

/// The last tick at or before a time, of a schedule that ticks every so often. Ticks are counted from the beginning of 1970 in
/// UTC, so that all hosts have the same; less than a millisecond counts as one.
///
/// ```
/// use std::time::Duration;
/// use taskonce_core::record::WallTime;
/// use taskonce_worker::send::tick_before;
///
/// let hour = Duration::from_secs(3600);
/// assert_eq!(tick_before(WallTime(7_250_000), hour), WallTime(7_200_000));
/// assert_eq!(tick_before(WallTime(7_200_000), hour), WallTime(7_200_000));
/// ```
#[must_use]
pub fn tick_before(now: WallTime, every: Duration) -> WallTime {
    let every = u64::try_from(every.as_millis()).unwrap_or(u64::MAX).max(1);
    WallTime(now.0 - now.0 % every)
}

/// The id of a tick's task: `nightly/2026-11-30T02:00:00Z`, in UTC, with milliseconds where there are some.
#[must_use]
pub fn tick_id(schedule: &Name, tick: WallTime) -> String {
    let (year, month, day) = date(tick.0 / DAY);
    let (in_day, millis) = (tick.0 % DAY / SECOND, tick.0 % SECOND);
    let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
    let part = if millis == 0 { String::new() } else { format!(".{millis:03}") };
    format!("{schedule}/{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{part}Z")
}

/// Year, month and day in UTC, so many days after 1970 began.
///
/// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", 2013, `civil_from_days`.
fn date(days: u64) -> (u64, u64, u64) {
    // Years begin in March there, so that the leap day is the last.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_of_a_tick_is_its_time_in_utc() {
        let name = Name::new("nightly").unwrap();
        for (millis, text) in [
            (0, "nightly/1970-01-01T00:00:00Z"),
            (951_782_400_000, "nightly/2000-02-29T00:00:00Z"),
            (1_709_251_199_999, "nightly/2024-02-29T23:59:59.999Z"),
            (1_709_251_200_000, "nightly/2024-03-01T00:00:00Z"),
            (1_796_004_000_000, "nightly/2026-11-30T02:00:00Z"),
            (4_107_542_400_000, "nightly/2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(tick_id(&name, WallTime(millis)), text);
        }
    }

    #[test]
    fn every_moment_of_an_interval_has_the_same_tick() {
        let quarter = Duration::from_secs(900);
        for moment in [900_000, 900_001, 1_799_999] {
            assert_eq!(tick_before(WallTime(moment), quarter), WallTime(900_000));
        }
        assert_eq!(tick_before(WallTime(1_800_000), quarter), WallTime(1_800_000));
        assert_eq!(tick_before(WallTime(5), Duration::ZERO), WallTime(5));
    }
}
