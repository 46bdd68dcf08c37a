//! Divides a version into buckets of tensors, each for one subscription, which `tensor_relay._stream` receives in turn.

use crate::{description::Description, select::Select, snapshot::Snapshot};
use pyo3::prelude::*;
use tensor_relay_client::{GLOBS_MAX, SELECTION_MAX_BYTES, Tensor};

/// The names of the tensors that `select` matches (by default all), in published order and in buckets of at most
/// `bucket_bytes`. A larger tensor has a bucket of its own.
#[pyfunction]
pub(crate) fn buckets(
    py: Python<'_>,
    description: &Description,
    bucket_bytes: u64,
    select: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<Vec<String>>> {
    let select = Select::parse(py, select)?;
    let checked = select.check(description.id(), description.manifest());
    checked.map_err(|message| crate::errors::Kind::Request.raise(py, message))?;
    let tensors = description.manifest().tensors().iter();
    Ok(in_buckets(tensors.filter(|tensor| select.has(tensor.name.as_str())), bucket_bytes))
}

/// Whether a snapshot is a bucket of the version that `description` describes, and not of a later version or epoch.
#[pyfunction]
pub(crate) fn is_bucket_of(description: &Description, snapshot: &Snapshot) -> bool {
    snapshot.is_of(description)
}

fn in_buckets<'a>(tensors: impl Iterator<Item = &'a Tensor>, bucket_bytes: u64) -> Vec<Vec<String>> {
    let mut buckets: Vec<Vec<String>> = vec![];
    let (mut bytes, mut name_bytes) = (0, 0);
    for tensor in tensors {
        let name = tensor.name.as_str();
        // A bucket's names must also fit one `Subscribe` message.
        let fits = |bucket: &Vec<String>| {
            bytes + tensor.byte_len() <= bucket_bytes
                && name_bytes + name.len() <= SELECTION_MAX_BYTES
                && bucket.len() < GLOBS_MAX
        };
        match buckets.last_mut().filter(|bucket| fits(bucket)) {
            Some(bucket) => bucket.push(name.to_owned()),
            None => {
                buckets.push(vec![name.to_owned()]);
                (bytes, name_bytes) = (0, 0);
            }
        }
        bytes += tensor.byte_len();
        name_bytes += name.len();
    }
    buckets
}
