//! Durations and sizes as people write and read them: `30s`, `14d`, `1MiB`; `2 min 5 s`, `1.5 KiB`.

use std::time::Duration;

const SECOND: u64 = 1000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Reads a duration: a whole number and one unit of `ms`, `s`, `m`, `h`, `d`.
///
/// # Errors
/// What is wrong with it and how one is written, for a message. A number without a unit is none.
pub fn duration(text: &str) -> Result<Duration, String> {
    let form = "write a whole number and a unit, such as `500ms`, `30s`, `5m`, `2h` or `14d`";
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale = match unit {
        "ms" => 1,
        "s" => SECOND,
        "m" => MINUTE,
        "h" => HOUR,
        "d" => DAY,
        "" if digits > 0 => return Err(format!("the unit is missing; {form}")),
        _ => return Err(format!("this is no duration; {form}")),
    };
    let number: u64 = number.parse().map_err(|_| format!("this is no duration; {form}"))?;
    let millis = number.checked_mul(scale).filter(|millis| i64::try_from(*millis).is_ok());
    millis.map(Duration::from_millis).ok_or_else(|| "this duration is too long".to_owned())
}

/// Reads a size in bytes: a whole number and one unit of `B`, `KiB`, `MiB`, `GiB`.
///
/// # Errors
/// What is wrong with it and how one is written, for a message.
pub fn size(text: &str) -> Result<usize, String> {
    let form = "write a whole number and a unit, such as `1024B`, `64KiB` or `1MiB`";
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale = match unit {
        "B" => 1,
        "KiB" => 1024,
        "MiB" => 1024 * 1024,
        "GiB" => 1024 * 1024 * 1024,
        "" if digits > 0 => return Err(format!("the unit is missing; {form}")),
        _ => return Err(format!("this is no size; {form}")),
    };
    let number: usize = number.parse().map_err(|_| format!("this is no size; {form}"))?;
    number.checked_mul(scale).ok_or_else(|| "this size is too large".to_owned())
}

/// A duration as [`duration`] reads it, in the largest unit that says it exactly: `90s`, `2h`, `1500ms`. What is below a
/// millisecond is cut off.
#[must_use]
pub fn written(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let units = [(DAY, "d"), (HOUR, "h"), (MINUTE, "m"), (SECOND, "s")];
    match units.into_iter().find(|(scale, _)| millis >= *scale && millis % scale == 0) {
        Some((scale, unit)) => format!("{}{unit}", millis / scale),
        None if millis == 0 => "0s".to_owned(),
        None => format!("{millis}ms"),
    }
}

/// A duration for people, in its two largest units: `450 ms`, `3 s`, `2 min 5 s`, `13 d 23 h`.
#[must_use]
pub fn spell(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let two = |large: u64, large_name: &str, small: u64, small_name: &str| {
        let (whole, rest) = (millis / large, millis % large / small);
        if rest == 0 { format!("{whole} {large_name}") } else { format!("{whole} {large_name} {rest} {small_name}") }
    };
    match millis {
        0..SECOND => format!("{millis} ms"),
        SECOND..MINUTE => format!("{} s", millis / SECOND),
        MINUTE..HOUR => two(MINUTE, "min", SECOND, "s"),
        HOUR..DAY => two(HOUR, "h", MINUTE, "min"),
        DAY.. => two(DAY, "d", HOUR, "h"),
    }
}

/// What is left of something, for people: rounded up, so that waiting so long is enough.
#[must_use]
pub fn spell_left(left: Duration) -> String {
    let millis = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    // Of each, what `spell` leaves out is below the second unit.
    let step = match millis {
        0..SECOND => 1,
        SECOND..HOUR => SECOND,
        HOUR..DAY => MINUTE,
        DAY.. => HOUR,
    };
    spell(Duration::from_millis(millis.div_ceil(step).saturating_mul(step)))
}

/// A number of bytes for people: `80 B`, `1.5 KiB`.
#[must_use]
pub fn spell_size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut scaled = bytes as f64 / 1024.0;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    let text = format!("{scaled:.1}");
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_a_whole_number_and_one_unit() {
        for (text, millis) in [("0s", 0), ("500ms", 500), ("30s", 30_000), ("5m", 300_000), ("2h", 7_200_000)] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(duration("14d"), Ok(Duration::from_secs(14 * 24 * 60 * 60)));
        for bad in ["", "s", "5", "-1s", "1.5s", " 1s", "1 s", "1S", "1h30m", "99999999999999999999s", "9999999999999d"]
        {
            assert!(duration(bad).is_err(), "{bad}");
        }
        assert!(duration("5").unwrap_err().contains("unit is missing"));
    }

    #[test]
    fn a_duration_is_written_as_it_is_read() {
        for text in ["0s", "1ms", "1500ms", "30s", "90s", "2m", "36h", "14d"] {
            assert_eq!(written(duration(text).unwrap()), text);
        }
        assert_eq!(
            (written(Duration::from_secs(3600)), written(Duration::from_micros(900))),
            ("1h".into(), "0s".into())
        );
    }

    #[test]
    fn sizes_are_a_whole_number_and_one_binary_unit() {
        assert_eq!(size("0B"), Ok(0));
        assert_eq!(size("1MiB"), Ok(1024 * 1024));
        for bad in ["", "1", "1MB", "1mib", "-1B", "1.5KiB", "99999999999999999999GiB", "18446744073709551615GiB"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_are_spelled_in_their_two_largest_units() {
        let spelled = |millis| spell(Duration::from_millis(millis));
        assert_eq!(spelled(450), "450 ms");
        assert_eq!(spelled(3_999), "3 s");
        assert_eq!(spelled(120_000), "2 min");
        assert_eq!(spelled(125_000), "2 min 5 s");
        assert_eq!(spelled(14 * DAY - 1), "13 d 23 h");
        let left = |millis| spell_left(Duration::from_millis(millis));
        assert_eq!((left(450), left(17_001), left(59_001)), ("450 ms".into(), "18 s".into(), "1 min".into()));
        assert_eq!((left(HOUR + 1), left(DAY + 1)), ("1 h 1 min".into(), "1 d 1 h".into()));
    }

    #[test]
    fn sizes_are_spelled_in_binary_units() {
        assert_eq!(spell_size(80), "80 B");
        assert_eq!(spell_size(1536), "1.5 KiB");
        assert_eq!(spell_size(1024 * 1024), "1 MiB");
    }
}
