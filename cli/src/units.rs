//! Parses and formats sizes, rates and durations.

use std::time::Duration;

const UNITS: [(&str, u64); 5] =
    [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

const LONG_UNITS: [(&str, u64); 5] = [("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400), ("w", 604_800)];

/// Parses a size such as `64MiB`, `1.5GiB` or `4096`. Only binary units are accepted, because memory is counted in
/// them.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = if unit.is_empty() { "B" } else { unit.trim() };
    let unit_factor = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
    let (_, factor) =
        unit_factor.ok_or_else(|| format!("unknown unit {unit:?}: write B, KiB, MiB, GiB or TiB"))?;
    let number: f64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a size: write e.g. 64MiB"))?;
    let bytes = number * *factor as f64;
    match bytes >= 1.0 && bytes < (1u64 << 62) as f64 {
        true => Ok(bytes as u64),
        false => Err(format!("{text:?} is out of range")),
    }
}

/// Parses a size like [`parse_bytes`], or `0`.
pub(crate) fn parse_bytes_or_zero(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => parse_bytes(text),
    }
}

/// Parses a rate such as `100Mbit` or `1.5Gbit`, and returns bytes per second.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    const WRONG: &str = "write a rate such as 500Kbit, 100Mbit or 1Gbit";
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let factor = match &*unit.to_ascii_lowercase() {
        "kbit" => 1e3,
        "mbit" => 1e6,
        "gbit" => 1e9,
        _ => return Err(WRONG.into()),
    };
    let bytes = number.trim().parse::<f64>().map_err(|_| WRONG)? * factor / 8.0;
    match (RATE_MIN..RATE_MAX).contains(&bytes) {
        true => Ok(bytes as u64),
        false => Err(format!("{text:?} is out of range")),
    }
}

/// The rates in bytes per second that [`parse_rate`] accepts: from 100 Kbit/s, at which a chunk takes minutes.
const RATE_MIN: f64 = 12_500.0;
const RATE_MAX: f64 = 1e13;

/// Parses a number of seconds, e.g. `0.5`.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|d| d.as_secs() < 1 << 31)
        .ok_or_else(|| format!("{text:?} is out of range"))
}

/// Parses a number of seconds like [`parse_seconds`], except 0, for timeouts that must not expire immediately.
pub(crate) fn parse_positive_seconds(text: &str) -> Result<Duration, String> {
    match parse_seconds(text)? {
        Duration::ZERO => Err("it must be more than 0".into()),
        seconds => Ok(seconds),
    }
}

/// Parses a duration with a unit: `90s`, `15m`, `12h`, `30d`, `4w`.
pub(crate) fn parse_long_time(text: &str) -> Result<Duration, String> {
    let invalid =
        || format!("{text:?} is not a duration: write a number and a unit (s, m, h, d or w), as in 30d");
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(invalid)?;
    let (_, factor) = LONG_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?;
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(*factor));
    seconds
        .filter(|seconds| (1..1 << 40).contains(seconds))
        .map(Duration::from_secs)
        .ok_or_else(invalid)
}

/// Formats a long duration in its largest unit, rounded down: `3d`, `12h`, `5s`.
pub(crate) fn long_time(time: Duration) -> String {
    let seconds = time.as_secs();
    let fitting = LONG_UNITS[..4].iter().rev().find(|(_, factor)| seconds >= *factor);
    fitting.map_or_else(|| "0s".into(), |(name, factor)| format!("{}{name}", seconds / factor))
}

/// Formats a size: `1.00 GiB`, `86.7 MiB`, `512 B`.
pub(crate) fn bytes(bytes: u64) -> String {
    let fitting = UNITS.iter().rev().find(|(_, factor)| bytes >= *factor);
    match fitting {
        Some((name, factor)) if *factor > 1 => {
            format!("{} {name}", three_digits(bytes as f64 / *factor as f64))
        }
        _ => format!("{bytes} B"),
    }
}

/// Formats a count with its noun: `1 tensor`, `12 tensors`.
pub(crate) fn count(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Formats a count of generations of watched files, with its verb: `3 generations of its files were`.
pub(crate) fn missed_generations(missed: u64) -> String {
    let were = if missed == 1 { "was" } else { "were" };
    format!("{} of its files {were}", count(missed as usize, "generation"))
}

/// Formats a rate in decimal units, as is usual for networks: `2.61 GB/s`.
pub(crate) fn rate(bytes: u64, duration: Duration) -> String {
    let per_second = bytes as f64 / duration.as_secs_f64().max(1e-9);
    match per_second {
        r if r >= 1e9 => format!("{} GB/s", three_digits(r / 1e9)),
        r if r >= 1e6 => format!("{} MB/s", three_digits(r / 1e6)),
        r => format!("{} kB/s", three_digits(r / 1e3)),
    }
}

/// Formats a duration: `1.24 s`, `86.0 ms`, `140 µs`.
pub(crate) fn time(duration: Duration) -> String {
    match duration.as_secs_f64() {
        s if s >= 1.0 => format!("{} s", three_digits(s)),
        s if s >= 1e-3 => format!("{} ms", three_digits(s * 1e3)),
        s => format!("{} µs", three_digits(s * 1e6)),
    }
}

fn three_digits(value: f64) -> String {
    match value {
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_durations_are_parsed_and_formatted() {
        for (text, seconds) in
            [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000), ("1w", 604_800)]
        {
            assert_eq!(parse_long_time(text), Ok(Duration::from_secs(seconds)));
        }
        for text in ["", "d", "0d", "30", "-1d", "1.5h", "30 d", "99999999999999999999d", "3ö"] {
            assert!(parse_long_time(text).is_err(), "{text}");
        }
        let formatted = [0, 59, 60, 86_399, 86_400, 10_000_000].map(|s| long_time(Duration::from_secs(s)));
        assert_eq!(formatted, ["0s", "59s", "1m", "23h", "1d", "115d"]);
    }

    #[test]
    fn sizes_are_parsed() {
        for (text, expected) in [("1GiB", 1 << 30), ("1.5mib", 3 << 19), ("4096", 4096), ("64 KiB", 64 << 10)]
        {
            assert_eq!(parse_bytes(text), Ok(expected), "{text}");
        }
        for wrong in ["", "GiB", "1GB", "0", "-1", "1e400", "99999999TiB", "1.2.3MiB"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rates_are_in_bits_and_counted_in_bytes() {
        assert_eq!(parse_rate("100Mbit"), Ok(12_500_000));
        assert_eq!((parse_rate("1.6 gbit"), parse_rate("800Kbit")), (Ok(200_000_000), Ok(100_000)));
        for wrong in ["", "100", "Mbit", "-1Mbit", "0Gbit", "1Kbit", "1e9Gbit", "10MB", "inf Gbit", "NaNGbit"]
        {
            assert!(parse_rate(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn zero_is_accepted_on_request() {
        assert_eq!((parse_bytes_or_zero("0"), parse_bytes_or_zero("1KiB")), (Ok(0), Ok(1024)));
        assert!(parse_bytes_or_zero("0.1").is_err());
    }

    #[test]
    fn seconds_are_bounded() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["-1", "nan", "inf", "1e300", "ten"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(bytes(1 << 30), "1.00 GiB");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(90_868_376), "86.7 MiB");
        assert_eq!(rate(2_610_000_000, Duration::from_secs(1)), "2.61 GB/s");
        assert_eq!(time(Duration::from_micros(86_040)), "86.0 ms");
    }
}
