//! Divides a version into buckets of tensors, each for one subscription, which `tensor_relay._stream` receives in turn.

use crate::{
    client::Client, description::Description, errors::Kind, select::Select, snapshot::Snapshot,
    subscription::Subscription,
};
use pyo3::prelude::*;
use std::{ops::Range, sync::Arc};
use tensor_relay_client::{Glob, Manifest, Request, Selection, Start, VersionId};

/// A part of a version: whole chunks, with the tensors in them.
#[pyclass(frozen, module = "tensor_relay._native")]
pub(crate) struct Bucket {
    version: VersionId,
    manifest: Arc<Manifest>,
    select: Vec<Glob>,
    chunks: Range<u32>,
    names: Vec<String>,
    /// Whether it is the version's last: its receipt completes the version.
    is_last: bool,
}

/// The tensors that `select` matches (by default all), in buckets of at most `bucket_bytes` that share no chunk. A
/// chunk, or a tensor, that is larger has a bucket of its own. The buckets are in the order of the payload, and their
/// tensors in published order.
#[pyfunction]
pub(crate) fn buckets(
    py: Python<'_>,
    description: &Description,
    bucket_bytes: u64,
    select: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<Bucket>> {
    let select = Select::parse(py, select)?;
    let (version, manifest) = (description.id(), description.manifest());
    let checked = select.check(version, manifest);
    checked.map_err(|message| Kind::Request.raise(py, message))?;
    let select = select.patterns().unwrap_or_default().to_vec();
    let parts = Selection::new(Arc::clone(manifest), &select).split(bucket_bytes);
    let last = parts.len().saturating_sub(1);
    let bucket = |(index, part): (usize, &Selection)| {
        let tensors = part.tensors().iter().map(|index| &manifest.tensors()[index as usize]);
        // Every part has the empty tensors.
        let names = tensors.filter(|tensor| index == 0 || tensor.byte_len() > 0);
        Bucket {
            version: version.clone(),
            manifest: Arc::clone(manifest),
            select: select.clone(),
            chunks: part.chunks().ranges().first().map_or(0, |first| first.start)
                ..part.chunks().ranges().last().map_or(0, |last| last.end),
            names: names.map(|tensor| tensor.name.to_string()).collect(),
            is_last: index == last,
        }
    };
    Ok(parts.iter().enumerate().map(bucket).collect())
}

/// Whether a snapshot is a bucket of the version that `description` describes, and not of a later version or epoch.
#[pyfunction]
pub(crate) fn is_bucket_of(description: &Description, snapshot: &Snapshot) -> bool {
    snapshot.is_of(description)
}

#[pymethods]
impl Bucket {
    /// The names of its tensors, in published order.
    #[getter]
    fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    /// Subscribes to it: the version is retained for the subscription, which should end after its first snapshot.
    fn subscribe(&self, client: Bound<'_, Client>) -> PyResult<Subscription> {
        let VersionId { topic, epoch, version } = self.version.clone();
        let request = Request::every(topic).from(Start::Exactly(Some(epoch), version)).window(1);
        let request = request
            .select(self.select.iter().cloned())
            .part(Arc::clone(&self.manifest), self.chunks.clone());
        let request = if self.is_last { request } else { request.uncounted() };
        Client::subscribe_to_part(&client, request, self.is_last)
    }
}
