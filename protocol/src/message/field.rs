//! Conversion of message fields to and from protobuf, implemented once per type of field.
//!
//! [`message_fields`] and [`message_kinds`] implement both directions for a message from the conversions of its fields.

use super::{LaneGrant, LaneId, SubscriptionId, WatchId};
use crate::{
    Epoch, Glob, ManifestDigest, MessageError, RangeSet, ReaderName, Topic, Version, VersionDigest,
    ticket::check_address,
};

/// A field of a message. [`from_wire`](Self::from_wire) validates the peer's value.
pub(crate) trait Field: Sized {
    /// The field's protobuf type.
    type Wire;

    fn into_wire(self) -> Self::Wire;

    /// Converts a received value. `field` is the field's name, for errors.
    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError>;
}

/// The most ranges of chunks in a message. A client with more verified ranges discards some before it subscribes again;
/// a longer `Request` is sent as several messages.
pub const PARTIAL_RANGES_MAX: usize = 1024;

/// The longest address: a name of 255 bytes, a colon and a port.
const ADDRESS_MAX_BYTES: usize = 261;

/// Converts a list of at most `max` items. `item` converts one.
pub(crate) fn list<W, T>(
    what: &'static str,
    max: usize,
    wire: Vec<W>,
    item: impl FnMut(W) -> Result<T, MessageError>,
) -> Result<Vec<T>, MessageError> {
    match wire.len() > max {
        true => Err(MessageError::TooMany { what, found: wire.len(), max }),
        false => wire.into_iter().map(item).collect(),
    }
}

/// The value of a field that must be present.
pub(crate) fn required<T>(field: &'static str, value: Option<T>) -> Result<T, MessageError> {
    value.ok_or(MessageError::MissingField(field))
}

/// The value of a field of exactly `N` bytes.
pub(crate) fn exactly<const N: usize>(field: &'static str, bytes: &[u8]) -> Result<[u8; N], MessageError> {
    bytes
        .try_into()
        .map_err(|_| MessageError::WrongLength { field, expected: N, found: bytes.len() })
}

/// The address in `text`, after a check that it is `host:port`, as in a ticket.
pub(crate) fn address(text: String) -> Result<String, MessageError> {
    match text.len() <= ADDRESS_MAX_BYTES && check_address(&text).is_ok() {
        true => Ok(text),
        false => Err(MessageError::Malformed("an address that is not `host:port`".into())),
    }
}

/// Implements [`Field`] for a struct whose fields are those of the protobuf message `$Wire` of the parent module. `$parts` is a pattern that
/// destructures the struct and an expression that constructs it. `$check` validates relations between fields.
macro_rules! message_fields {
    ($Struct:ident $parts:tt => $Wire:ident { $($field:ident),* $(,)? } $(, $check:path)?) => {
        impl $crate::message::field::Field for $Struct {
            type Wire = super::wire::$Wire;

            fn into_wire(self) -> Self::Wire {
                let $Struct $parts = self;
                super::wire::$Wire { $($field: $crate::message::field::Field::into_wire($field)),* }
            }

            fn from_wire(_: &'static str, wire: Self::Wire) -> Result<Self, $crate::MessageError> {
                let super::wire::$Wire { $($field),* } = wire;
                $(let $field = $crate::message::field::Field::from_wire(stringify!($field), $field)?;)*
                let message = $Struct $parts;
                $($check(&message)?;)?
                Ok(message)
            }
        }
    };
}

/// Implements both directions for an enum of messages. Its arguments are first the variants that contain a struct, then
/// the variants with inline fields, each as a pattern and a protobuf message with its fields.
macro_rules! message_kinds {
    (
        $Message:ident as $From:ident, $Kind:ident: $($Own:ident)*;
        $($Variant:ident $parts:tt => $Wire:ident { $($field:ident),* })*
    ) => {
        impl From<$Message> for super::wire::$From {
            fn from(message: $Message) -> Self {
                use super::wire;
                use $crate::message::field::Field;
                let kind = match message {
                    $($Message::$Own(own) => wire::$Kind::$Own(own.into_wire()),)*
                    $($Message::$Variant $parts => wire::$Kind::$Variant(wire::$Wire {
                        $($field: $field.into_wire()),*
                    }),)*
                };
                Self { kind: Some(kind) }
            }
        }

        impl $Message {
            /// Decodes a message from the bytes that follow its length.
            ///
            /// # Errors
            /// [`MessageError`](crate::MessageError) when the bytes are not a valid message.
            pub fn decode(bytes: &[u8]) -> Result<Self, $crate::MessageError> {
                use super::wire;
                use $crate::message::field::{Field, required};
                let message: wire::$From =
                    ::prost::Message::decode(bytes).map_err($crate::MessageError::malformed)?;
                Ok(match required("kind", message.kind)? {
                    $(wire::$Kind::$Own(own) => Self::$Own(Field::from_wire(stringify!($Own), own)?),)*
                    $(wire::$Kind::$Variant(wire::$Wire { $($field),* }) => {
                        $(let $field = Field::from_wire(stringify!($field), $field)?;)*
                        Self::$Variant $parts
                    })*
                })
            }
        }
    };
}

pub(crate) use {message_fields, message_kinds};

/// Implements [`Field`] for types that are also their wire types.
macro_rules! plain {
    ($($Type:ty)*) => {$(
        impl Field for $Type {
            type Wire = Self;

            fn into_wire(self) -> Self {
                self
            }

            fn from_wire(_: &'static str, wire: Self) -> Result<Self, MessageError> {
                Ok(wire)
            }
        }
    )*};
}

/// Implements [`Field`] for newtypes of numbers.
macro_rules! numbers {
    ($($Type:ident($number:ty))*) => {$(
        impl Field for $Type {
            type Wire = $number;

            fn into_wire(self) -> $number {
                self.0
            }

            fn from_wire(_: &'static str, wire: $number) -> Result<Self, MessageError> {
                Ok(Self(wire))
            }
        }
    )*};
}

/// Implements [`Field`] for newtypes of byte arrays.
macro_rules! bytes {
    ($($Type:ident)*) => {$(
        impl Field for $Type {
            type Wire = Vec<u8>;

            fn into_wire(self) -> Vec<u8> {
                self.0.to_vec()
            }

            fn from_wire(field: &'static str, wire: Vec<u8>) -> Result<Self, MessageError> {
                exactly(field, &wire).map(Self)
            }
        }
    )*};
}

/// Implements [`Field`] for validated names.
macro_rules! names {
    ($($Type:ident)*) => {$(
        impl Field for $Type {
            type Wire = String;

            fn into_wire(self) -> String {
                self.as_str().into()
            }

            fn from_wire(_: &'static str, wire: String) -> Result<Self, MessageError> {
                Ok(Self::new(&wire)?)
            }
        }
    )*};
}

plain! { u32 u64 bool String }
numbers! { SubscriptionId(u32) WatchId(u32) LaneId(u32) Epoch(u64) Version(u64) }
bytes! { VersionDigest ManifestDigest }
names! { Topic ReaderName Glob }

pub(crate) use {bytes, numbers};

impl<const N: usize> Field for [u8; N] {
    type Wire = Vec<u8>;

    fn into_wire(self) -> Vec<u8> {
        self.to_vec()
    }

    fn from_wire(field: &'static str, wire: Vec<u8>) -> Result<Self, MessageError> {
        exactly(field, &wire)
    }
}

impl<T: Field> Field for Box<T> {
    type Wire = T::Wire;

    fn into_wire(self) -> Self::Wire {
        T::into_wire(*self)
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        T::from_wire(field, wire).map(Self::new)
    }
}

impl<T: Field> Field for Option<T> {
    type Wire = Option<T::Wire>;

    fn into_wire(self) -> Self::Wire {
        self.map(T::into_wire)
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        wire.map(|wire| T::from_wire(field, wire)).transpose()
    }
}

impl Field for LaneGrant {
    type Wire = Vec<u8>;

    fn into_wire(self) -> Vec<u8> {
        self.bytes().to_vec()
    }

    fn from_wire(field: &'static str, wire: Vec<u8>) -> Result<Self, MessageError> {
        exactly(field, &wire).map(Self::new)
    }
}

impl Field for RangeSet {
    type Wire = Vec<super::wire::ChunkRange>;

    fn into_wire(self) -> Self::Wire {
        let ranges = self.ranges().iter();
        ranges
            .map(|range| super::wire::ChunkRange { start: range.start, end: range.end })
            .collect()
    }

    fn from_wire(field: &'static str, wire: Self::Wire) -> Result<Self, MessageError> {
        let ranges = list(field, PARTIAL_RANGES_MAX, wire, |range| Ok(range.start..range.end))?;
        Self::from_ranges(ranges)
            .ok_or_else(|| MessageError::Malformed("chunk ranges that are not a sorted set".into()))
    }
}
