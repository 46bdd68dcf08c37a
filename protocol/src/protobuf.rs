//! Protobuf messages as tables: a line for each field, as in the schema.

/// Defines messages of which a line `1 [uint32] name: u32,` describes the field 1: the part in brackets is prost's
/// attribute without the field's number.
macro_rules! messages {
    ($($message:ident { $($number:tt [$($kind:tt)+] $field:ident: $type:ty,)* })*) => {$(
        #[derive(Clone, PartialEq, ::prost::Message)]
        pub(crate) struct $message {
            $(#[prost($($kind)+, tag = $number)] pub(crate) $field: $type,)*
        }
    )*};
}

/// Defines the choices of a `oneof`: a line for each message, with the number of its field.
macro_rules! oneof {
    ($(#[$attribute:meta])* $oneof:ident { $($number:tt $choice:ident($message:ty),)* }) => {
        #[derive(Clone, PartialEq, ::prost::Oneof)]
        $(#[$attribute])*
        pub(crate) enum $oneof {
            $(#[prost(message, tag = $number)] $choice($message),)*
        }
    };
}

pub(crate) use {messages, oneof};
