//! Named values in display order.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser::SerializeMap};
use std::{fmt, marker::PhantomData};

/// A list of named values in display order, serialised as a JSON object.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Cells<T>(pub(crate) Vec<(String, T)>);

impl<T> Cells<T> {
    /// Creates cells from `(name, value)` pairs.
    pub(crate) fn of<const N: usize>(cells: [(&str, T); N]) -> Self {
        Self(cells.map(|(name, value)| (name.to_owned(), value)).into())
    }

    /// Appends a value, if it is `Some`.
    pub(crate) fn and(mut self, name: &str, value: Option<T>) -> Self {
        self.0.extend(value.map(|value| (name.to_owned(), value)));
        self
    }

    /// The value called `name`.
    pub(crate) fn get(&self, name: &str) -> Option<&T> {
        self.0.iter().find_map(|(cell, value)| (cell == name).then_some(value))
    }
}

impl<T> Default for Cells<T> {
    fn default() -> Self {
        Self(vec![])
    }
}

impl<T: Serialize> Serialize for Cells<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Cells<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(CellsVisitor(PhantomData))
    }
}

struct CellsVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> de::Visitor<'de> for CellsVisitor<T> {
    type Value = Cells<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut cells = Vec::new();
        while let Some(cell) = map.next_entry()? {
            cells.push(cell);
        }
        Ok(Cells(cells))
    }
}
