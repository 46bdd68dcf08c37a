//! Summaries of samples: median and range, and ratios of pairs with a confidence interval.

use serde::Serialize;

/// The median and the range of samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// The middle value; of an even number of values, the mean of the two middle ones.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Summary {
    /// Summarises `values`; `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = in_order(values);
        Some(Self { median: median(&sorted)?, min: *sorted.first()?, max: *sorted.last()? })
    }
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [median, min, max] = [self.median, self.min, self.max].map(format_number);
        match self.min == self.max {
            true => write!(f, "{median}"),
            false => write!(f, "{median} ({min} to {max})"),
        }
    }
}

/// The ratio of A to B, measured in pairs, with a confidence interval.
///
/// Both values of a pair are measured in succession, so that slow changes of the machine's speed cancel out. The
/// interval is that of the sign test, for any distribution: the median lies between the k-th smallest and the k-th
/// largest ratio with a probability that follows from the binomial distribution. The narrowest interval of at least
/// 95 % is chosen. Fewer than six pairs have none: the fields then contain the range of all ratios and its confidence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PairedRatio {
    /// The median of A / B.
    pub median: f64,
    /// The lower bound of the interval.
    pub low: f64,
    /// The upper bound.
    pub high: f64,
    /// The probability that the interval holds the true median, e.g. 0.9375 for five pairs.
    pub confidence: f64,
    /// The number of pairs.
    pub pairs: usize,
}

impl PairedRatio {
    /// Summarises `a / b` of each `(a, b)`; `None` if there are none.
    pub fn of(pairs: &[(f64, f64)]) -> Option<Self> {
        let ratios: Vec<f64> = pairs.iter().map(|(a, b)| a / b).collect();
        let sorted = in_order(&ratios);
        let (cut, confidence) = cut_and_confidence(sorted.len());
        Some(Self {
            median: median(&sorted)?,
            low: *sorted.get(cut)?,
            high: *sorted.get(sorted.len() - 1 - cut)?,
            confidence,
            pairs: sorted.len(),
        })
    }

    /// The bounds of the interval; `None` if there are too few pairs.
    pub(crate) fn interval(&self) -> Option<(f64, f64)> {
        (self.confidence >= CONFIDENCE).then_some((self.low, self.high))
    }
}

/// The median, and in brackets its interval, the confidence and the number of pairs.
impl std::fmt::Display for PairedRatio {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { median, confidence, pairs, .. } = self;
        match self.interval() {
            Some((low, high)) => {
                let percent = confidence * 100.0;
                write!(f, "{median:.3} ({low:.3} to {high:.3}, {percent:.1} %, pairs: {pairs})")
            }
            None => write!(f, "{median:.3} (–, pairs: {pairs})"),
        }
    }
}

/// The largest number of values that can be dropped at either end of `count` sorted ones, such that the median lies
/// within the others with a probability of at least 95 %; and that probability. Of fewer than six values none can be
/// dropped, and the probability is lower.
fn cut_and_confidence(count: usize) -> (usize, f64) {
    // The logarithm of the probability that exactly `cut` of `count` fair coins show heads: 0.5^2000 underflows an f64.
    let mut chance = -(count as f64) * std::f64::consts::LN_2;
    let mut confidence = 1.0 - 2.0 * chance.exp();
    let mut cut = 0;
    loop {
        chance += ((count - cut) as f64 / (cut + 1) as f64).ln();
        let narrower = confidence - 2.0 * chance.exp();
        if narrower < CONFIDENCE {
            return (cut, confidence.max(0.0));
        }
        (cut, confidence) = (cut + 1, narrower);
    }
}

fn in_order(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The median of sorted values.
fn median(sorted: &[f64]) -> Option<f64> {
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = sorted[(sorted.len() - 1) / 2];
    Some((lower + upper) / 2.0)
}

/// Formats `value` with about three significant digits: further ones are noise.
pub(crate) fn format_number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 || size == 0.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// The minimum confidence of an interval.
const CONFIDENCE: f64 = 0.95;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_summary_has_the_median_and_the_range() {
        assert_eq!(Summary::of(&[]), None);
        let odd = Summary::of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((odd.median, odd.min, odd.max), (2.0, 1.0, 3.0));
        assert_eq!(odd.to_string(), "2.00 (1.00 to 3.00)");
        assert_eq!(Summary::of(&[50.0]).unwrap().to_string(), "50.0", "one value has no spread");
        assert_eq!(Summary::of(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
    }

    /// The ranks agree with published tables of the sign test.
    #[test]
    fn intervals_are_those_of_the_sign_test() {
        let permille = |count| {
            let (cut, confidence) = cut_and_confidence(count);
            (cut, (confidence * 1000.0).round() as u32)
        };
        assert_eq!(permille(5), (0, 938));
        assert_eq!(permille(6), (0, 969));
        assert_eq!(permille(10), (1, 979));
        assert_eq!(permille(20), (5, 959));
        assert_eq!(permille(2000).0, 955);
    }

    #[test]
    fn ratios_have_a_median_and_an_interval() {
        let ratio = PairedRatio::of(&[(2.0, 1.0), (4.0, 2.0), (6.0, 3.0)]).unwrap();
        assert_eq!((ratio.median, ratio.low, ratio.high, ratio.pairs), (2.0, 2.0, 2.0, 3));
        assert_eq!(ratio.to_string(), "2.000 (–, pairs: 3)", "too few for an interval");
        assert_eq!(PairedRatio::of(&[]), None);
        let six = PairedRatio::of(&[(2.0, 1.0); 6]).unwrap();
        assert_eq!(six.to_string(), "2.000 (2.000 to 2.000, 96.9 %, pairs: 6)");
    }

    #[test]
    fn numbers_have_about_three_significant_digits() {
        for (value, text) in
            [(1234.5, "1234"), (12.345, "12.3"), (1.2345, "1.23"), (0.012345, "0.012"), (0.0, "0")]
        {
            assert_eq!(format_number(value), text);
        }
    }

    proptest! {
        #[test]
        fn the_median_lies_in_its_interval(pairs in prop::collection::vec((0.1f64..9.0, 0.1f64..9.0), 1..60)) {
            let ratio = PairedRatio::of(&pairs).unwrap();
            prop_assert!(ratio.low <= ratio.median && ratio.median <= ratio.high);
            prop_assert_eq!(ratio.interval().is_some(), pairs.len() >= 6);
            prop_assert!((0.0..=1.0).contains(&ratio.confidence));
        }
    }
}
