//! Buffers: the user's own memory, by tensor name, and its lending to the session.

mod boxes;
mod error;
mod fit;
mod lending;

pub use error::BufferError;
pub use fit::NameMatch;
pub(crate) use fit::{Expectation, Expected, Fit, fit};
pub(crate) use lending::{Lender, Lent, LentMemory, Writing};

use std::{collections::BTreeMap, sync::Arc};
use tensor_relay_device::HostBytes;
use tensor_relay_protocol::{
    Bounds, Dtype, GLOBS_MAX, Glob, SELECTION_MAX_BYTES, Shape, TensorBox, TensorName,
};

/// The caller's memory for tensors, one buffer per tensor: a `Vec<u8>`, or a tensor of another library.
///
/// A buffer must be exactly as long as its tensor; dtype and shape are checked only where they are
/// [expected](Self::expect). [`Subscription::next_into`](crate::Subscription::next_into) takes the buffers, and gives
/// them back with its result or error. Buffers on a device are [`DeviceBuffer`](tensor_relay_device::DeviceBuffer)s,
/// for [`next_into_device`](crate::Subscription::next_into_device).
///
/// ```
/// use tensor_relay_client::{Buffers, TensorName};
///
/// let bias = TensorName::new("model.bias").unwrap();
/// let buffers: Buffers<Vec<u8>> = [(bias, vec![0; 4096])].into_iter().collect();
/// assert_eq!(buffers.get("model.bias").unwrap().len(), 4096);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffers<B> {
    by_name: BTreeMap<TensorName, B>,
    expected: Arc<Expected>,
}

impl<B> Default for Buffers<B> {
    fn default() -> Self {
        Self { by_name: BTreeMap::new(), expected: Arc::default() }
    }
}

impl<B> FromIterator<(TensorName, B)> for Buffers<B> {
    /// Keeps the last of several buffers for one tensor.
    fn from_iter<I: IntoIterator<Item = (TensorName, B)>>(buffers: I) -> Self {
        Self { by_name: buffers.into_iter().collect(), expected: Arc::default() }
    }
}

impl<B> IntoIterator for Buffers<B> {
    type Item = (TensorName, B);
    type IntoIter = std::collections::btree_map::IntoIter<TensorName, B>;

    fn into_iter(self) -> Self::IntoIter {
        self.by_name.into_iter()
    }
}

impl<B> Buffers<B> {
    /// Returns an empty collection.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer for the tensor called `name`; returns the previous one.
    pub fn insert(&mut self, name: TensorName, buffer: B) -> Option<B> {
        self.by_name.insert(name, buffer)
    }

    /// Requires this dtype and shape for the tensor called `name`, or for the box of it that the
    /// [request](crate::Request::boxes) selects; other versions are refused before anything is written. For memory that
    /// is a tensor itself, whose elements would otherwise be misread.
    pub fn expect(&mut self, name: TensorName, dtype: Dtype, shape: Shape) {
        self.expect_exactly(name, Expectation { dtype, shape, bounds: None });
    }

    /// Like [`expect`](Self::expect), for a buffer that holds this box of a tensor of this dtype and shape.
    pub fn expect_box(&mut self, name: TensorName, dtype: Dtype, shape: Shape, bounds: Bounds) {
        let bounds = Some(bounds).filter(|bounds| !bounds.is_whole(&shape));
        self.expect_exactly(name, Expectation { dtype, shape, bounds });
    }

    fn expect_exactly(&mut self, name: TensorName, expectation: Expectation) {
        Arc::make_mut(&mut self.expected).tensors.insert(name, expectation);
    }

    /// The boxes that buffers [expect](Self::expect_box), for [`Request::boxes`](crate::Request::boxes). A request holds at
    /// most 256, with 8,192 bytes of names: tensors whose names differ in numbers only count once if they are cut alike.
    pub fn boxes(&self) -> Vec<TensorBox> {
        boxes::boxes_of(&self.expected)
    }

    /// Uses the buffer of `to` for the tensor called `name` too, and requires that these two tensors share their bytes
    /// (tied weights).
    pub fn expect_tied(&mut self, name: TensorName, to: TensorName) {
        Arc::make_mut(&mut self.expected).tied.insert(name, to);
    }

    /// Sets how strictly the names of buffers and tensors must match. By default every buffer must have its tensor.
    pub fn match_names(&mut self, names: NameMatch) {
        Arc::make_mut(&mut self.expected).names = names;
    }

    /// The writable buffers, and the requirements on versions.
    pub(crate) fn by_name_mut(&mut self) -> (&mut BTreeMap<TensorName, B>, &Expected) {
        (&mut self.by_name, &self.expected)
    }

    pub(crate) fn expected(&self) -> &Expected {
        &self.expected
    }

    /// The buffer of the tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&B> {
        self.by_name.get(name)
    }

    /// The buffer of the tensor called `name`, for writing.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut B> {
        self.by_name.get_mut(name)
    }

    /// Every buffer with the name of its tensor, in the order of names.
    pub fn iter(&self) -> impl Iterator<Item = (&TensorName, &B)> {
        self.by_name.iter()
    }

    /// The number of buffers.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether there are no buffers.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// The names of the tensors that have a buffer, as globs for [`Request::select`](crate::Request::select), so that
    /// few other tensors are sent. Empty, which selects every tensor, if there are no buffers, or if their names are
    /// more than a selection holds (64 globs with 8,192 bytes in total): then write globs yourself.
    ///
    /// A name that contains `*` or `?` also selects the other names that it matches: those tensors are received and
    /// discarded.
    pub fn selection(&self) -> Vec<Glob> {
        let bytes: usize = self.by_name.keys().map(|name| name.as_str().len()).sum();
        if self.len() > GLOBS_MAX || bytes > SELECTION_MAX_BYTES {
            return vec![];
        }
        let globs: Result<_, _> = self.by_name.keys().map(|name| Glob::new(name.as_str())).collect();
        globs.unwrap_or_default()
    }
}

/// The bytes copied between yields: less than a millisecond's work, so that the executor is not blocked.
pub(crate) const COPY_BYTES: usize = 1 << 20;

/// Copies `bytes` to `out`, which has the same length, yielding to other tasks.
pub(crate) async fn copy_yielding(bytes: &HostBytes, out: &mut [u8]) {
    for (index, out) in out.chunks_mut(COPY_BYTES).enumerate() {
        let start = index * COPY_BYTES;
        bytes.slice(start..start + out.len()).copy_to(out);
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> TensorName {
        TensorName::new(name).unwrap()
    }

    #[test]
    fn the_selection_has_every_name_or_is_empty() {
        let named = |count| {
            (0..count)
                .map(|i| (name(&format!("t{i}*")), vec![]))
                .collect::<Buffers<Vec<u8>>>()
        };
        let globs = named(64).selection();
        assert_eq!(globs.len(), 64);
        assert!(globs.iter().any(|glob| glob.matches("t7*")), "a name is matched by itself");
        assert!(named(65).selection().is_empty());
        let long = (0..40).map(|i| (name(&format!("{i}{}", "x".repeat(250))), vec![]));
        assert!(long.collect::<Buffers<Vec<u8>>>().selection().is_empty());
    }
}
