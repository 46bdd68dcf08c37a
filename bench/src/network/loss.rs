//! The loss rate of a link.

use serde::Serialize;
use std::{fmt, str::FromStr};

/// The share of lost packets, in percent: above 0, below 100.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Loss(f64);

impl Loss {
    /// The number of lost packets per million packets.
    pub(super) fn per_million(self) -> u32 {
        (self.0 * 1e4).round() as u32
    }
}

impl FromStr for Loss {
    type Err = String;

    /// Parses `1`, `0.1` or `1%`.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text).trim_end();
        let percent: f64 = number.parse().map_err(|_| format!("{text:?} is no number"))?;
        let loss = Self(percent);
        match percent < 100.0 && loss.per_million() > 0 {
            true => Ok(loss),
            false => Err(format!("{text} is not between 0.0001 and 100 percent")),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_parsed() {
        let per_million = |text: &str| text.parse().map(Loss::per_million);
        assert_eq!(per_million("1"), Ok(10_000));
        assert_eq!(per_million("0.1%"), Ok(1000));
        for wrong in ["", "x", "0", "100", "-1", "NaN", "0.00001"] {
            assert!(per_million(wrong).is_err(), "{wrong:?}");
        }
    }
}
