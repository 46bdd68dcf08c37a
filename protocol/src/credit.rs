//! Credit: the number of further chunks that a sender may push (PROTOCOL.md §6.4).

use crate::ProtocolViolation;

/// The credit of one subscription: the number of further chunks that the sender may push on it.
///
/// The receiver grants credit; the sender spends one credit per pushed chunk. A receiver grants no more than its connection's
/// flow-control window can hold unread, so a stalled subscription blocks no other one and no control stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Credit {
    available: u32,
}

impl Credit {
    /// The most credit that a subscription can have: 16 GiB in chunks of 4 MiB.
    pub const MAX: u32 = 4096;

    /// The credit of `chunks` chunks with which a subscription begins.
    ///
    /// # Errors
    /// [`ProtocolViolation::CreditOverflow`] beyond [`Credit::MAX`].
    pub fn new(chunks: u32) -> Result<Self, ProtocolViolation> {
        let mut credit = Self { available: 0 };
        credit.grant(chunks)?;
        Ok(credit)
    }

    /// Adds credit for `chunks` chunks.
    ///
    /// # Errors
    /// [`ProtocolViolation::CreditOverflow`] when more than [`Credit::MAX`] would be available.
    pub fn grant(&mut self, chunks: u32) -> Result<(), ProtocolViolation> {
        match self.available.checked_add(chunks).filter(|sum| *sum <= Self::MAX) {
            Some(sum) => {
                self.available = sum;
                Ok(())
            }
            None => Err(ProtocolViolation::CreditOverflow(Self::MAX)),
        }
    }

    /// Spends credit for one chunk; false if none is available.
    pub fn spend(&mut self) -> bool {
        let is_available = self.available > 0;
        self.available -= u32::from(is_available);
        is_available
    }

    /// The remaining credit.
    pub fn available(&self) -> u32 {
        self.available
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// For any grants and spends, no more is spent than granted, and no more than the maximum is available.
        #[test]
        fn never_more_than_granted(steps in prop::collection::vec(prop::option::of(0u32..3000), 0..200)) {
            let mut credit = Credit::new(0).unwrap();
            let (mut granted, mut spent) = (0u64, 0u64);
            for step in steps {
                match step {
                    Some(chunks) => granted += if credit.grant(chunks).is_ok() { chunks.into() } else { 0u64 },
                    None => spent += u64::from(credit.spend()),
                }
                prop_assert!(spent <= granted);
                prop_assert_eq!(u64::from(credit.available()), granted - spent);
                prop_assert!(credit.available() <= Credit::MAX);
            }
        }
    }
}
