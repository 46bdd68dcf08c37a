//! The order of names in a header, which the reference parser discards. Byte-identical copies need it.

use super::METADATA_KEY;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use std::{collections::HashMap, fmt};

/// The position of each tensor and each metadata key in a header. For a duplicate name, that of the last occurrence.
#[derive(Debug, Default)]
pub(super) struct Order {
    pub(super) tensors: Keys,
    pub(super) metadata: Keys,
}

/// The keys of an object, with their positions.
#[derive(Debug, Default)]
pub(super) struct Keys(HashMap<String, usize>);

impl Keys {
    pub(super) fn position(&self, key: &str) -> Option<usize> {
        self.0.get(key).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    fn push(&mut self, key: String) {
        let position = self.0.len();
        self.0.insert(key, position);
    }
}

impl<'de> Deserialize<'de> for Order {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(OrderVisitor)
    }
}

struct OrderVisitor;

impl<'de> Visitor<'de> for OrderVisitor {
    type Value = Order;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Order, A::Error> {
        let mut order = Order::default();
        while let Some(key) = map.next_key::<String>()? {
            if key == METADATA_KEY {
                order.metadata = map.next_value::<Option<Keys>>()?.unwrap_or_default();
            } else {
                map.next_value::<IgnoredAny>()?;
                order.tensors.push(key);
            }
        }
        Ok(order)
    }
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(KeysVisitor)
    }
}

struct KeysVisitor;

impl<'de> Visitor<'de> for KeysVisitor {
    type Value = Keys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
        let mut keys = Keys::default();
        while let Some(key) = map.next_key()? {
            map.next_value::<IgnoredAny>()?;
            keys.push(key);
        }
        Ok(keys)
    }
}
