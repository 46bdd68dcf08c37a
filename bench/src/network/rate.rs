//! The rate of a link.

use serde::Serialize;
use std::{fmt, str::FromStr};

/// The rate of a link in bits per second, counting Ethernet frames without their checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Rate(u64);

impl Rate {
    /// The rate in bits per second.
    pub fn bits_per_s(self) -> u64 {
        self.0
    }

    /// The number of bytes sent in `us` microseconds.
    pub(super) fn bytes_in_us(self, us: u64) -> u64 {
        (u128::from(self.0) * u128::from(us) / 8_000_000) as u64
    }
}

impl FromStr for Rate {
    type Err = String;

    /// Parses `1Gbit`, `2.5 Gbit/s` or `100Mbit`.
    fn from_str(text: &str) -> Result<Self, String> {
        let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(number_end);
        let unit = unit.trim();
        let unit = unit.strip_suffix("/s").unwrap_or(unit);
        let (_, scale) = UNITS
            .into_iter()
            .find(|(name, _)| *name == unit)
            .ok_or_else(|| format!("{text:?} has no unit: write Kbit, Mbit or Gbit"))?;
        let number: f64 = number.parse().map_err(|_| format!("{text:?} does not begin with a number"))?;
        let bits_per_s = number * scale as f64;
        if !(RATE_MIN..=RATE_MAX).contains(&bits_per_s) {
            return Err(format!("{text} is out of range: a rate is between 1Mbit and 1000Gbit"));
        }
        Ok(Self(bits_per_s.round() as u64))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, scale) = UNITS.into_iter().find(|(_, scale)| self.0 >= *scale).unwrap_or(UNITS[2]);
        write!(f, "{} {unit}/s", self.0 as f64 / scale as f64)
    }
}

/// The units of rates, in powers of 1000, and their bits per second.
const UNITS: [(&str, u64); 3] = [("Gbit", 1_000_000_000), ("Mbit", 1_000_000), ("Kbit", 1000)];

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
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.bits_per_s(), rate.to_string().as_str()), (bits_per_s, shown));
            assert_eq!(shown.parse(), Ok(rate));
        }
        for wrong in ["", "1", "Gbit", "1GB", "-1Gbit", "1Kbit", "9999999Gbit", "1..2Gbit", "infGbit"] {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn bytes_are_counted_by_rate_and_time() {
        assert_eq!("1Gbit".parse::<Rate>().unwrap().bytes_in_us(1000), 125_000);
    }
}
