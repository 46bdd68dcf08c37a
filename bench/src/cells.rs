//! Named values in display order.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

/// Named values in display order, serialised as a JSON object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Cells<T>(pub(crate) IndexMap<String, T>);

impl<T> Cells<T> {
    /// Creates cells from `(name, value)` pairs.
    pub(crate) fn of<const N: usize>(cells: [(&str, T); N]) -> Self {
        Self(cells.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// Appends a value, if it is `Some`.
    pub(crate) fn and(mut self, name: &str, value: Option<T>) -> Self {
        self.0.extend(value.map(|value| (name.to_owned(), value)));
        self
    }

    /// The value called `name`.
    pub(crate) fn get(&self, name: &str) -> Option<&T> {
        self.0.get(name)
    }
}

impl<T> Default for Cells<T> {
    fn default() -> Self {
        Self(IndexMap::new())
    }
}
