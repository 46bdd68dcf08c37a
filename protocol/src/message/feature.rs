//! Features: optional parts of the protocol, offered in `Hello` and `Welcome` (PROTOCOL.md §3.11).

use super::{ClientMessage, Field, Order, ServerMessage, Start};
use crate::{MessageError, ProtocolViolation};

/// Defines the enum of features, each with its number and name.
macro_rules! features {
    ($($(#[$doc:meta])* $Feature:ident = $code:literal, $name:literal;)*) => {
        /// An optional part of the protocol, used only towards an end that offered it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Feature { $($(#[$doc])* $Feature,)* }

        impl Feature {
            /// Every feature that this build knows.
            pub const ALL: &'static [Self] = &[$(Self::$Feature,)*];

            /// The number on the wire.
            pub const fn code(self) -> u32 {
                match self { $(Self::$Feature => $code,)* }
            }

            /// The name in error messages.
            pub fn name(self) -> &'static str {
                match self { $(Self::$Feature => $name,)* }
            }
        }
    };
}

features! {
    /// One version by its number, or manifests alone: `Subscribe.once`, `Subscribe.describe` and `start` 5.
    Get = 1, "get";
    /// Chunks in another order than that of the payload: `Subscribe.order`.
    Order = 2, "order";
    /// Manifests with tensors in pieces.
    Layout2 = 3, "layout2";
    /// Chunks from other clients: `Share`, `Held`, `BadPeer`, `Sources`, `Encodings`, `Revoke`, `Announce.shared` and
    /// `Subscribe.grant`.
    Peers = 4, "peers";
    /// Alternatives to a server that will shut down: `Drain`.
    Drain = 5, "drain";
    /// Measurements of a lane's rate: `Probe` and its data streams.
    Probe = 6, "probe";
    /// The hashes of a version's chunks, for several sources: `Request.hashes` and `Request.again`.
    Hashes = 7, "hashes";
    /// Reports that versions were loaded: `Loaded`.
    Loaded = 8, "loaded";
    /// Parts of tensors: `Subscribe.boxes`.
    Boxes = 9, "boxes";
    /// Versions in memory that the client maps: `Subscribe.memory`, `Announce.lending` and `Decline`.
    Memory = 10, "memory";
}

/// A set of features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FeatureSet(u32);

impl FeatureSet {
    /// The features that a client of this build offers.
    pub const OF_CLIENT: Self = Self(Self::bit(Feature::Drain) | Self::bit(Feature::Layout2));

    /// The features that a server of this build offers.
    pub const OF_SERVER: Self = Self(
        Self::bit(Feature::Get)
            | Self::bit(Feature::Probe)
            | Self::bit(Feature::Hashes)
            | Self::bit(Feature::Loaded)
            | Self::bit(Feature::Boxes),
    );

    /// This set and `feature`.
    #[must_use]
    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | Self::bit(feature))
    }

    /// The features with these numbers. Unknown numbers are ignored.
    pub fn from_codes(codes: &[u32]) -> Self {
        let features = Feature::ALL.iter().filter(|feature| codes.contains(&feature.code()));
        features.fold(Self::default(), |set, feature| Self(set.0 | Self::bit(*feature)))
    }

    /// Whether `feature` is in the set.
    pub fn contains(self, feature: Feature) -> bool {
        self.0 & Self::bit(feature) != 0
    }

    /// The features in the set.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.iter().copied().filter(move |feature| self.contains(*feature))
    }

    /// Checks that this set, which one end offered, allows its peer to send `found`, which needs `feature`.
    ///
    /// # Errors
    /// [`ProtocolViolation::FeatureNotOffered`] otherwise.
    pub fn permit(self, found: &'static str, feature: Feature) -> Result<(), ProtocolViolation> {
        match self.contains(feature) {
            true => Ok(()),
            false => Err(ProtocolViolation::FeatureNotOffered { found, feature: feature.name() }),
        }
    }

    const fn bit(feature: Feature) -> u32 {
        1 << feature.code()
    }
}

impl Field for FeatureSet {
    type Wire = Vec<u32>;

    fn into_wire(self) -> Vec<u32> {
        self.iter().map(Feature::code).collect()
    }

    fn from_wire(_: &'static str, wire: Vec<u32>) -> Result<Self, MessageError> {
        Ok(Self::from_codes(&wire))
    }
}

impl ClientMessage {
    /// Checks that the server `offered` the features that this message needs.
    ///
    /// # Errors
    /// [`ProtocolViolation::FeatureNotOffered`] names the first missing feature.
    pub fn check_features(&self, offered: FeatureSet) -> Result<(), ProtocolViolation> {
        let only = |found, feature| [Some((found, feature)), None, None, None, None, None, None];
        let needed = match self {
            Self::Subscribe(subscribe) => [
                subscribe.once.then_some(("Subscribe.once", Feature::Get)),
                subscribe.describe.then_some(("Subscribe.describe", Feature::Get)),
                matches!(subscribe.start, Start::Exactly(..)).then_some(("Subscribe.start 5", Feature::Get)),
                (subscribe.order != Order::Layout).then_some(("Subscribe.order", Feature::Order)),
                (!subscribe.boxes.is_empty()).then_some(("Subscribe.boxes", Feature::Boxes)),
                subscribe.memory.then_some(("Subscribe.memory", Feature::Memory)),
                subscribe.grant.is_some().then_some(("Subscribe.grant", Feature::Peers)),
            ],
            Self::Probe { .. } => only("Probe", Feature::Probe),
            Self::Request { hashes: true, .. } => only("Request.hashes", Feature::Hashes),
            Self::Request { again: true, .. } => only("Request.again", Feature::Hashes),
            Self::Loaded { .. } => only("Loaded", Feature::Loaded),
            Self::Share(_) => only("Share", Feature::Peers),
            Self::Held(_) => only("Held", Feature::Peers),
            Self::Check { .. } => only("Check", Feature::Peers),
            Self::BadPeer { .. } => only("BadPeer", Feature::Peers),
            Self::Decline { .. } => only("Decline", Feature::Memory),
            _ => [None; 7],
        };
        needed
            .into_iter()
            .flatten()
            .try_for_each(|(found, feature)| offered.permit(found, feature))
    }
}

impl ServerMessage {
    /// Checks that the client `offered` the feature that this message needs.
    ///
    /// # Errors
    /// [`ProtocolViolation::FeatureNotOffered`] otherwise.
    pub fn check_features(&self, offered: FeatureSet) -> Result<(), ProtocolViolation> {
        match self {
            Self::Announce(announce) if announce.shared => offered.permit("Announce.shared", Feature::Peers),
            Self::Sources { .. } => offered.permit("Sources", Feature::Peers),
            Self::Encodings { .. } => offered.permit("Encodings", Feature::Peers),
            Self::Held(_) => offered.permit("Held", Feature::Peers),
            Self::Revoke { .. } => offered.permit("Revoke", Feature::Peers),
            Self::Checked { .. } => offered.permit("Checked", Feature::Peers),
            Self::Drain { .. } => offered.permit("Drain", Feature::Drain),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// PROTOCOL.md §3.11: the numbers are part of the wire.
    #[test]
    fn feature_codes_are_frozen() {
        assert!(Feature::ALL.iter().map(|feature| feature.code()).eq(1..=10));
        let names =
            ["get", "order", "layout2", "peers", "drain", "probe", "hashes", "loaded", "boxes", "memory"];
        assert!(Feature::ALL.iter().map(|feature| feature.name()).eq(names));
    }

    #[test]
    fn sets_ignore_unknown_numbers() {
        let set = FeatureSet::from_codes(&[4, 0, 77, u32::MAX, 1, 4]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [Feature::Get, Feature::Peers]);
        assert_eq!(FeatureSet::from_codes(&set.into_wire()), set);
    }

    #[test]
    fn the_error_names_the_feature() {
        let drain = ServerMessage::Drain { alternatives: vec![] };
        let error = drain.check_features(FeatureSet::from_codes(&[1, 2, 3, 4, 6])).unwrap_err();
        assert!(
            error
                .to_string()
                .ends_with("needs the feature \"drain\", which this end did not offer")
        );
        assert_eq!(drain.check_features(FeatureSet::from_codes(&[5])), Ok(()));
    }
}
