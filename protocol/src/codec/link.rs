//! How fast the way to a subscriber is, as far as the choice of a codec cares.

/// A class of link speed.
///
/// Classes and not rates, because what is encoded for one subscriber is used for all that are to get the same: with five
/// classes there are few different choices, and subscribers of different classes mostly make the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum LinkClass {
    /// At most 1 Gbit/s.
    UpTo1,
    /// More than 1 and at most 5 Gbit/s.
    UpTo5,
    /// More than 5 and at most 10 Gbit/s. What a link is taken for before it was measured: a wrong guess costs little here,
    /// since nearly every codec is faster than that.
    #[default]
    UpTo10,
    /// More than 10 and at most 25 Gbit/s.
    UpTo25,
    /// More than 25 Gbit/s.
    Beyond25,
}

/// Bytes per second of one Gbit/s.
const GBIT: f64 = 1e9 / 8.0;

/// A link must be so much faster than its class, or slower, to change it: rates vary by a few per cent, and each change of
/// class may encode chunks that were encoded already. Downwards, what a link of a round number of Gbit/s loses to headers
/// and pauses must not keep it in the class above, so the gap lies above the bound.
const UP: f64 = 1.15;
const DOWN: f64 = 0.98;

impl LinkClass {
    /// Every class, the slowest first.
    pub const ALL: &'static [Self] = &[Self::UpTo1, Self::UpTo5, Self::UpTo10, Self::UpTo25, Self::Beyond25];

    /// The class of a link that carries so many bytes per second.
    pub fn of(bytes_per_s: f64) -> Self {
        let slow = Self::ALL.iter().copied().find(|class| bytes_per_s <= class.upper_bytes_per_s());
        slow.unwrap_or(Self::Beyond25)
    }

    /// The class of a link of this class that was now seen to carry so many bytes per second: the same, unless the rate is
    /// well out of its bounds.
    pub fn after(self, bytes_per_s: f64) -> Self {
        let (up, down) = (Self::of(bytes_per_s / UP), Self::of(bytes_per_s / DOWN));
        self.clamp(up.min(down), up.max(down))
    }

    /// What a choice reckons with: the upper bound of the class, and beyond 25 Gbit/s a link of 100.
    pub fn bytes_per_s(self) -> f64 {
        match self {
            Self::Beyond25 => 100.0 * GBIT,
            bounded => bounded.upper_bytes_per_s(),
        }
    }

    fn upper_bytes_per_s(self) -> f64 {
        match self {
            Self::UpTo1 => GBIT,
            Self::UpTo5 => 5.0 * GBIT,
            Self::UpTo10 => 10.0 * GBIT,
            Self::UpTo25 => 25.0 * GBIT,
            Self::Beyond25 => f64::INFINITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_link_that_keeps_its_rate_keeps_its_class() {
        for (gbit, class) in [
            (0.3, LinkClass::UpTo1),
            (0.95, LinkClass::UpTo1),
            (4.8, LinkClass::UpTo5),
            (9.6, LinkClass::UpTo10),
            (24.0, LinkClass::UpTo25),
            (60.0, LinkClass::Beyond25),
        ] {
            assert_eq!(LinkClass::default().after(gbit * GBIT), class, "{gbit} Gbit/s");
            assert_eq!(class.after(gbit * GBIT * 1.04), class, "{gbit} Gbit/s and a little more");
        }
    }

    #[test]
    fn a_class_is_left_well_beyond_its_bound() {
        for (classes, bound) in LinkClass::ALL.windows(2).zip([1.0, 5.0, 10.0, 25.0]) {
            let after = |class: LinkClass, share: f64| class.after(bound * share * 1e9 / 8.0);
            let (slow, fast) = (classes[0], classes[1]);
            assert_eq!([after(slow, 1.14), after(slow, 1.16)], [slow, fast], "{bound} Gbit/s");
            assert_eq!([after(fast, 0.99), after(fast, 0.97)], [fast, slow], "{bound} Gbit/s");
            assert_eq!(slow.bytes_per_s(), bound * 1e9 / 8.0);
        }
        assert_eq!(LinkClass::Beyond25.bytes_per_s(), 100e9 / 8.0);
    }

    proptest! {
        /// A rate that varies by a few per cent moves a link to another class once and not back.
        #[test]
        fn small_variations_do_not_move_it(start in 0usize..5, gbit in 0.01f64..200.0, varied in prop::collection::vec(0.94f64..1.06, 1..20)) {
            let settled = varied.iter().fold(LinkClass::ALL[start].after(gbit * GBIT), |class, _| class.after(gbit * GBIT));
            let mut class = settled;
            let mut moves = 0;
            for factor in varied {
                let next = class.after(gbit * factor * GBIT);
                moves += u32::from(next != class);
                class = next;
            }
            prop_assert!(moves <= 1, "{} moves from {:?}", moves, settled);
        }

        /// The class is never one that the rate is far from.
        #[test]
        fn a_class_fits_its_rate(start in 0usize..5, gbit in 0.01f64..200.0) {
            let class = LinkClass::ALL[start].after(gbit * GBIT);
            prop_assert!(class >= LinkClass::of(gbit / UP * GBIT) && class <= LinkClass::of(gbit / DOWN * GBIT));
        }
    }
}
