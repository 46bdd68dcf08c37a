//! Rates in bits per second, counting Ethernet frames without their checksum, and losses in percent.

/// Parses `1Gbit`, `2.5 Gbit/s` or `100Mbit`.
///
/// # Errors
/// A sentence for the command line.
pub(super) fn parse_rate(text: &str) -> Result<u64, String> {
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(number_end);
    let unit = unit.trim();
    let found = UNITS.iter().find(|(name, _)| *name == unit.strip_suffix("/s").unwrap_or(unit));
    let (_, scale) = found.ok_or_else(|| format!("{text:?} has no unit: write Kbit, Mbit or Gbit"))?;
    let number: f64 = number.parse().map_err(|_| format!("{text:?} does not begin with a number"))?;
    match number * scale {
        bits_per_s if (RATE_MIN..=RATE_MAX).contains(&bits_per_s) => Ok(bits_per_s.round() as u64),
        _ => Err(format!("{text} is out of range: a rate is between 1Mbit and 1000Gbit")),
    }
}

/// Formats a rate in the largest unit of which it has at least one.
pub(super) fn rate_text(bits_per_s: u64) -> String {
    let (unit, scale) = UNITS.iter().find(|(_, scale)| bits_per_s as f64 >= *scale).unwrap_or(&UNITS[2]);
    format!("{} {unit}/s", bits_per_s as f64 / scale)
}

/// Parses `1`, `0.1` or `1%`: above 0, below 100.
///
/// # Errors
/// A sentence for the command line.
pub(super) fn parse_loss(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim_end();
    let percent: f64 = number.parse().map_err(|_| format!("{text:?} is no number"))?;
    match percent < 100.0 && per_million(percent) > 0 {
        true => Ok(percent),
        false => Err(format!("{text} is not between 0.0001 and 100 percent")),
    }
}

/// The number of lost packets per million packets.
pub(super) fn per_million(percent: f64) -> u32 {
    (percent * 1e4).round() as u32
}

/// The units of rates, in powers of 1000, and their bits per second.
const UNITS: [(&str, f64); 3] = [("Gbit", 1e9), ("Mbit", 1e6), ("Kbit", 1e3)];

/// The range of rates, in bits per second.
const RATE_MIN: f64 = 1e6;
const RATE_MAX: f64 = 1e12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_parsed_and_formatted() {
        for (text, bits_per_s, shown) in [
            ("1Gbit", 1_000_000_000, "1 Gbit/s"),
            ("2.5 Gbit/s", 2_500_000_000, "2.5 Gbit/s"),
            ("100Mbit", 100_000_000, "100 Mbit/s"),
            ("1500Kbit", 1_500_000, "1.5 Mbit/s"),
        ] {
            let rate = parse_rate(text).unwrap();
            assert_eq!((rate, rate_text(rate).as_str()), (bits_per_s, shown));
            assert_eq!(parse_rate(shown), Ok(rate));
        }
        for wrong in ["", "1", "Gbit", "1GB", "-1Gbit", "1Kbit", "9999999Gbit", "1..2Gbit", "infGbit"] {
            assert!(parse_rate(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn percentages_are_parsed() {
        let lost = |text| parse_loss(text).map(per_million);
        assert_eq!(lost("1"), Ok(10_000));
        assert_eq!(lost("0.1%"), Ok(1000));
        for wrong in ["", "x", "0", "100", "-1", "NaN", "0.00001"] {
            assert!(lost(wrong).is_err(), "{wrong:?}");
        }
    }
}
