//! What `strict=False` leaves out: logged, once for each set of names.

use super::extra_state::Matched;
use crate::select::Select;
use std::collections::{BTreeSet, HashSet};
use tensor_relay_client::{BufferError, Manifest, Tensor, VersionId};
use tensor_relay_device::Lock;

/// The names that were last logged for a subscription.
#[derive(Default)]
pub(super) struct LeftOut(Lock<Option<BufferError>>);

impl LeftOut {
    /// Logs `left_out` of a version, unless it was the same in the last one.
    pub(super) fn log(&self, id: &VersionId, left_out: Option<BufferError>) {
        let mut logged = self.0.lock();
        if *logged != left_out {
            if let Some(left_out) = &left_out {
                tracing::warn!("strict=False receives a part of {id}: {left_out}.");
            }
            *logged = left_out;
        }
    }
}

/// The tensors and extra state that only the version has, and those that only `out` has, whose names are `names`.
pub(super) fn of(
    manifest: &Manifest,
    select: Option<&Select>,
    names: &BTreeSet<String>,
    extra: &Matched,
) -> Option<BufferError> {
    let is_selected = |name: &str| select.is_none_or(|select| select.has(name));
    // A tensor of `out` covers all names of the version's tensor.
    let named = names.iter().filter_map(|name| manifest.tensor(name));
    let with_bytes = named.filter(|tensor| tensor.byte_len() > 0);
    let received: HashSet<u64> = with_bytes.map(Tensor::offset).collect();
    let is_received = |tensor: &Tensor| tensor.byte_len() > 0 && received.contains(&tensor.offset());
    let has_target =
        |tensor: &Tensor, name: &str| names.contains(name) || is_received(tensor) || !is_selected(name);
    let tensors = manifest.tensors().iter();
    let missing = tensors.filter(|tensor| !has_target(tensor, tensor.name.as_str()));
    let missing = missing.map(|tensor| Box::from(tensor.name.as_str()));
    let missing: Box<[Box<str>]> = missing.chain(extra.without_module.iter().cloned()).collect();
    let is_sent = |name: &str| manifest.tensor(name).is_some() && is_selected(name);
    let unexpected = names.iter().filter(|name| !is_sent(name)).map(|name| Box::from(name.as_str()));
    let unexpected: Box<[Box<str>]> = unexpected.chain(extra.without_value.iter().cloned()).collect();
    let is_whole = missing.is_empty() && unexpected.is_empty();
    (!is_whole).then_some(BufferError::OtherNames { missing, unexpected })
}
