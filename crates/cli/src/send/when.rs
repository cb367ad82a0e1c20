//! Times of day as people write them.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use taskonce::store::record::WallTime;

const FORM: &str = "write a time such as `2026-11-30T02:00Z` or `2026-11-30T02:00:00+01:00`";

/// A time with its offset, so that it is the same on every host.
pub(crate) fn instant(text: &str) -> Result<WallTime, String> {
    let stamp: Timestamp = text.parse().map_err(|_| format!("this is no time with an offset; {FORM}"))?;
    wall_time(stamp)
}

/// The same, or a time of this machine's zone.
pub(crate) fn time(text: &str) -> Result<WallTime, String> {
    if let Ok(stamp) = text.parse::<Timestamp>() {
        return wall_time(stamp);
    }
    let local: DateTime = text.parse().map_err(|_| format!("this is no time; {FORM}"))?;
    let stamp = TimeZone::system().to_timestamp(local);
    wall_time(stamp.map_err(|_| "this time lies outside of what can be told".to_owned())?)
}

fn wall_time(stamp: Timestamp) -> Result<WallTime, String> {
    u64::try_from(stamp.as_millisecond()).map(WallTime).map_err(|_| "this time lies before 1970".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_moment_is_one_time_however_it_is_written() {
        let wanted = WallTime(1_796_004_000_000);
        for text in
            ["2026-11-30T02:00Z", "2026-11-30T02:00:00Z", "2026-11-30 03:00:00+01:00", "2026-11-29T21:00:00-05:00"]
        {
            assert_eq!(instant(text), Ok(wanted), "{text}");
            assert_eq!(time(text), Ok(wanted), "{text}");
        }
        assert!(time("2026-11-30T02:00").is_ok());
        for text in ["2026-11-30T02:00", "2026-11-30", "now", "", "1950-01-01T00:00Z"] {
            assert!(instant(text).is_err(), "{text}");
        }
    }
}
