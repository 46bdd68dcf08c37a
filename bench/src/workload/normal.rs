//! The values of weights: bf16 numbers at the quantiles of a normal distribution.

/// The standard deviation with which transformers are initialised, and near which they stay.
const DEVIATION: f64 = 0.02;

/// The bf16 value (as bits) at each of 65,536 equally likely quantiles: a uniform 16-bit index draws a normally
/// distributed weight.
///
/// It is computed at compile time with exact IEEE arithmetic, so every build on every machine has the same table. Its
/// 128 KiB fit the second-level cache.
pub(super) static WEIGHTS: [u16; 2 * HALF] = quantiles();

/// Integrates from the median upwards; the lower half mirrors the upper half.
const fn quantiles() -> [u16; 2 * HALF] {
    let probability = 0.5 / HALF as f64;
    let mut table = [0; 2 * HALF];
    let mut point = advanced((0.0, PEAK), probability / 2.0);
    let mut i = 0;
    while i < HALF {
        let bits = bf16(DEVIATION * point.0);
        table[HALF + i] = bits;
        table[HALF - 1 - i] = bits | SIGN;
        point = advanced(point, probability);
        i += 1;
    }
    table
}

/// The quantile and the density of the standard normal distribution whose cumulative probability is higher by
/// `probability` than those given.
///
/// As functions of the cumulative probability, the quantile has the derivative 1 / density and the density
/// -quantile: two differential equations without an exponential. Midpoint steps stay within 0.001 of the exact
/// value, and within 0.03 for the last three points of the tail.
const fn advanced((quantile, density): (f64, f64), probability: f64) -> (f64, f64) {
    let half = probability / 2.0;
    let middle = (quantile + half / density, density - half * quantile);
    (quantile + probability / middle.1, density - probability * middle.0)
}

/// The density at the median: 1 / sqrt(2 pi).
const PEAK: f64 = 0.398_942_280_401_432_7;

/// The bf16 nearest to `value`, which must be finite; ties to even.
const fn bf16(value: f64) -> u16 {
    let bits = (value as f32).to_bits();
    let round = 0x7fff + ((bits >> 16) & 1);
    ((bits + round) >> 16) as u16
}

const HALF: usize = 1 << 15;
const SIGN: u16 = 1 << 15;

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> impl Iterator<Item = f64> {
        WEIGHTS.iter().map(|bits| f64::from(f32::from_bits(u32::from(*bits) << 16)))
    }

    fn moment(power: i32) -> f64 {
        values().map(|v| (v / DEVIATION).powi(power)).sum::<f64>() / WEIGHTS.len() as f64
    }

    #[test]
    fn the_moments_are_those_of_a_normal_distribution() {
        assert_eq!(moment(1), 0.0);
        assert!((moment(2) - 1.0).abs() < 0.01, "variance {}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.03, "kurtosis {}", moment(4));
    }

    #[test]
    fn quantiles_rise_to_the_tail() {
        assert!(values().is_sorted());
        let last = values().last().unwrap() / DEVIATION;
        assert!((4.1..4.4).contains(&last), "the normal distribution has 4.32 there: {last}");
    }

    #[test]
    fn bf16_rounds_to_the_nearest() {
        assert_eq!(bf16(1.0), 0x3f80);
        assert_eq!(bf16(1.0 + 1.0 / 256.0), 0x3f80, "a tie goes to even");
        assert_eq!(bf16(1.0 + 1.1 / 256.0), 0x3f81);
    }
}
