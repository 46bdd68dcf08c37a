//! Versions with tensors on a device: copied from it, borrowed in place, or copied to it.

use crate::{Borrowed, LendError, Publishable, StageError, Staged, Staging, lend::TensorParts};
use bytes::Bytes;
use std::{ops::Range, sync::Arc};
use tensor_relay_device::{
    AllocError, BoxFuture, CopyError, Device, DeviceBuffer, HostSink, HostSource, Loan, OnDevice, Region,
    Returned, Sink, SinkError, SlotPool, Source, SourceError, cuda::share::ShareError,
};
use tensor_relay_protocol::{Manifest, Metadata, TensorSpec};
use tensor_relay_transport::{
    Workers,
    egress::{self, Payload, READ_TIMEOUT},
};
use tokio::{sync::oneshot, task::JoinSet};

/// The number of concurrent chunk copies: one on the copy engine, one on a worker that copies it, and a spare for
/// each.
const CHUNKS_IN_FLIGHT: usize = 4;

/// Why a version cannot be copied from or to a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The tensors cannot form a version.
    #[error(transparent)]
    Tensors(#[from] LendError),
    /// There is no memory for them.
    #[error(transparent)]
    Memory(#[from] AllocError),
    /// They could not be copied from their device.
    #[error(transparent)]
    Read(#[from] SourceError),
    /// They could not be copied to their destination.
    #[error(transparent)]
    Write(#[from] SinkError),
    /// They could not be copied within their device.
    #[error(transparent)]
    Within(#[from] ShareError),
    /// A copy to the device did not finish before the timeout.
    #[error(
        "a copy of {asked_bytes} bytes to {device} did not end within {waited_ms} ms. The device hangs, or unfinished \
         copies hold all of its slots: look for the device's first error; if there is none, restart this process."
    )]
    TimedOut {
        /// The device.
        device: Box<str>,
        /// The bytes of the chunk.
        asked_bytes: u64,
        /// The time waited.
        waited_ms: u64,
    },
}

impl Staged {
    /// Lays out tensors on a device and copies them to the server's own host memory: when this returns, their producer
    /// may write to them again. Aliases have empty buffers.
    ///
    /// Costs the payload's size in host memory, within the server's budget. While one chunk is copied off the device,
    /// through one of its slots, a worker copies the previous one to its final memory. Dropping the future stops this
    /// and frees the memory.
    ///
    /// # Errors
    /// [`DeviceError`]; then no memory stays allocated.
    pub async fn from_device(
        staging: &Staging,
        tensors: Vec<(TensorSpec, DeviceBuffer)>,
        metadata: Metadata,
    ) -> Result<Self, DeviceError> {
        let (manifest, source) = lay_out(staging, tensors, metadata)?;
        let payload = copy_to_host(staging, &manifest, &source).await?;
        Ok(Self::of(staging, manifest, payload))
    }

    /// Copies the version to server-owned memory on `device`, to be served from there. Known hashes stay valid; the host
    /// memory is freed when this returns.
    ///
    /// # Errors
    /// [`DeviceError`]; then the version is dropped, on the host too.
    pub async fn onto(self, device: &Device) -> Result<Publishable, DeviceError> {
        let Self { payload, workers, .. } = self;
        let manifest = Arc::clone(payload.manifest());
        let len = manifest.payload_bytes() as usize;
        if len == 0 {
            return Ok(Publishable { payload: payload.into(), returned: None, charge: None, relayed: None });
        }
        let target = device.clone();
        let buffer = workers.run(move || target.allocate(len)).await?;
        let (source, sink) = (payload.source(), buffer.sink());
        let copied = copy_chunks(&manifest, |range| {
            copy_in(Arc::clone(source), range, Arc::clone(&sink), device.clone(), workers)
        });
        copied.await?;
        let payload = payload.through(buffer.source());
        Ok(Publishable { payload: payload.into(), returned: None, charge: None, relayed: None })
    }
}

impl Borrowed {
    /// Lays out tensors on a device and borrows them: they are copied off the device when they are sent, once for all
    /// subscribers that need them at about the same time. Aliases have empty buffers. Chunks are hashed when they are
    /// first sent.
    ///
    /// The producer must not write to the memory before [`Publication::released`](crate::Publication::released): when
    /// the version left retention (replaced, or [withdrawn](crate::Publication::withdraw)), nothing reads it, and the
    /// last copy out of it has ended. Data already copied out does not delay this. If a copy hangs, or was abandoned
    /// because it was late or its read was cancelled, the memory is never released: that copy may still read it, and
    /// its end is not reported.
    ///
    /// # Errors
    /// [`LendError`]; then the buffers are dropped.
    pub fn from_device(
        staging: &Staging,
        tensors: Vec<(TensorSpec, DeviceBuffer)>,
        metadata: Metadata,
    ) -> Result<Self, LendError> {
        let (manifest, source) = lay_out(staging, tensors, metadata)?;
        let (source, returned) = lend_source(source);
        Ok(Self { payload: Payload::new(manifest, source), returned: Some(returned) })
    }
}

impl Publishable {
    /// Lays out tensors on a device and copies them for the server: when this returns, their producer may write to them
    /// again. Aliases have empty buffers.
    ///
    /// With their own device as `device`, they are copied within it, as long as it has memory for them: at the rate
    /// of that memory, and chunks are hashed when they are first read. Otherwise they are copied to host
    /// memory ([`Staged::from_device`]), and from there to another `device`. If their own device has no memory, or if
    /// tensors are in pieces, the version stays in host memory.
    ///
    /// # Errors
    /// [`DeviceError`]; then no memory stays allocated, unless a copy within the device is late: that keeps its memory
    /// until it ends.
    pub async fn from_device(
        staging: &Staging,
        tensors: Vec<(TensorSpec, DeviceBuffer)>,
        metadata: Metadata,
        device: Option<&Device>,
    ) -> Result<Self, DeviceError> {
        let own = tensors.first().map(|(_, buffer)| buffer.device().clone());
        let is_own = |device: &&Device| own.as_ref().is_some_and(|own| own.is(device));
        let is_cut = tensors.iter().any(|(spec, _)| spec.alias_of.is_none() && !spec.cuts.is_empty());
        if let Some(own) = device.filter(is_own).filter(|_| !is_cut) {
            match copy_within(own, staging, tensors.clone(), metadata.clone()).await {
                Err(DeviceError::Within(ShareError::NotShareable { .. })) => {}
                Err(DeviceError::Memory(error)) => {
                    tracing::info!("A version is staged in host memory: {error}");
                }
                copied => return copied,
            }
        }
        let staged = Staged::from_device(staging, tensors, metadata).await?;
        match device.filter(|device| !is_own(device)) {
            Some(other) => staged.onto(other).await,
            None => Ok(staged.into()),
        }
    }
}

/// Copies a payload on a device to the server's host memory.
pub(crate) async fn copy_to_host(
    staging: &Staging,
    manifest: &Manifest,
    source: &Arc<dyn Source>,
) -> Result<Region, DeviceError> {
    let (allocator, len, workers) = (staging.clone(), manifest.payload_bytes() as usize, staging.workers);
    let region = workers.run(move || allocator.allocate(len)).await?;
    let sink = Arc::new(HostSink::new(region));
    let copied =
        copy_chunks(manifest, |range| copy_out(Arc::clone(source), range, Arc::clone(&sink), workers));
    copied.await?;
    Ok(sink.commit()?.pop().unwrap_or_default())
}

/// Copies tensors in one piece each on `device` to the server's memory there. Dropping the future stops nothing that
/// has begun.
async fn copy_within(
    device: &Device,
    staging: &Staging,
    tensors: Vec<(TensorSpec, DeviceBuffer)>,
    metadata: Metadata,
) -> Result<Publishable, DeviceError> {
    let (manifest, TensorParts { whole: parts, .. }) = lay_out_parts(staging, tensors, metadata)?;
    let (device, len) = (device.clone(), manifest.payload_bytes() as usize);
    let (copied, end) = oneshot::channel();
    // Not one of the threads for hashing and encoding: it waits for the producer's stream.
    staging.workers.spawn(move || {
        let allocated = device.allocate(len).map_err(DeviceError::from);
        let buffer = allocated.and_then(|to| Ok(device.copy_within(&to, &parts).map(|()| to)?));
        drop((parts, device)); // Before the caller goes on, who gives the tensors back.
        drop(copied.send(buffer));
    });
    let buffer = end.await.map_err(|_| CopyError::EngineStopped).map_err(SourceError::from)??;
    let payload = Payload::new(manifest, buffer.source());
    Ok(Publishable { payload: payload.into(), returned: None, charge: None, relayed: None })
}

/// Lends a source; the returned handle resolves when the source is no longer read.
pub(crate) fn lend_source(source: Arc<dyn Source>) -> (Arc<dyn Source>, Returned) {
    let (loan, returned) = Loan::new();
    (Arc::new(LentSource { source, loan: Arc::new(loan) }), returned)
}

/// Lays out tensors on one device: their manifest and the source of their payload.
fn lay_out(
    staging: &Staging,
    tensors: Vec<(TensorSpec, DeviceBuffer)>,
    metadata: Metadata,
) -> Result<(Arc<Manifest>, Arc<dyn Source>), LendError> {
    let Some(device) = tensors.first().map(|(_, buffer)| buffer.device().clone()) else {
        let manifest = staging.lay_out(vec![], metadata).map_err(StageError::from)?;
        return Ok((manifest, Arc::new(HostSource::new(Bytes::new()))));
    };
    let (manifest, TensorParts { whole, spread }) = lay_out_parts(staging, tensors, metadata)?;
    let source = device.spread_source(manifest.payload_bytes(), whole, spread)?;
    Ok((manifest, source))
}

/// Lays out tensors on one device: their manifest, and their memory as parts of the payload.
fn lay_out_parts(
    staging: &Staging,
    tensors: Vec<(TensorSpec, DeviceBuffer)>,
    metadata: Metadata,
) -> Result<(Arc<Manifest>, TensorParts<DeviceBuffer>), LendError> {
    let aliases: Vec<bool> = tensors.iter().map(|(spec, _)| spec.alias_of.is_some()).collect();
    let (specs, buffers): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let manifest = staging.lay_out(specs, metadata).map_err(StageError::from)?;
    for (tensor, buffer) in manifest.tensors().iter().zip(&buffers) {
        check_device(tensor.name.as_str(), buffer.device(), buffers[0].device())?;
    }
    let parts = TensorParts::new(&manifest, &aliases, buffers, DeviceBuffer::len_bytes)?;
    Ok((manifest, parts))
}

fn check_device(name: &str, device: &Device, first: &Device) -> Result<(), LendError> {
    match device.is(first) {
        true => Ok(()),
        false => Err(LendError::OtherDevice {
            name: name.into(),
            device: device.name().into(),
            first: first.name().into(),
        }),
    }
}

/// Runs `copy_chunk` for every chunk, a few at a time; returns the results in order. Dropping the future cancels all.
async fn copy_chunks<T: Send + 'static, F>(
    manifest: &Manifest,
    copy_chunk: impl Fn(Range<u64>) -> F,
) -> Result<Vec<T>, DeviceError>
where
    F: Future<Output = Result<T, DeviceError>> + Send + 'static,
{
    let mut chunks = manifest.chunking().iter();
    let mut copied: Vec<Option<T>> = (0..manifest.chunking().count()).map(|_| None).collect();
    let mut copying = JoinSet::new();
    loop {
        while copying.len() < CHUNKS_IN_FLIGHT
            && let Some((chunk, range)) = chunks.next()
        {
            let copy = copy_chunk(range);
            copying.spawn(async move { (chunk, copy.await) });
        }
        let Some(ended) = copying.join_next().await else {
            return Ok(copied.into_iter().flatten().collect());
        };
        let (chunk, outcome) = ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        copied[chunk.0 as usize] = Some(outcome?);
    }
}

/// Copies a chunk from a device to host memory.
async fn copy_out(
    source: Arc<dyn Source>,
    range: Range<u64>,
    sink: Arc<HostSink>,
    workers: Workers,
) -> Result<(), DeviceError> {
    let bytes = egress::read(&*source, range.clone()).await?;
    let mut target = sink.open(range).await?;
    let placed = workers.run(move || {
        target.copy_from_slice(&bytes);
        target
    });
    Ok(sink.write(placed.await).await?)
}

/// Copies a chunk from the host to a device.
async fn copy_in(
    source: Arc<dyn Source>,
    range: Range<u64>,
    sink: Arc<dyn Sink>,
    device: Device,
    workers: Workers,
) -> Result<(), DeviceError> {
    let asked_bytes = range.end - range.start;
    let copied = async {
        let bytes = source.read(range.clone()).await?;
        let mut target = sink.open(range).await?;
        let filled = workers.run(move || {
            target.copy_from_slice(&bytes);
            target
        });
        Ok(sink.write(filled.await).await?)
    };
    tokio::time::timeout(READ_TIMEOUT, copied).await.unwrap_or_else(|_| {
        let (device, waited_ms) = (device.name().into(), READ_TIMEOUT.as_millis() as u64);
        Err(DeviceError::TimedOut { device, asked_bytes, waited_ms })
    })
}

/// A source on loan. Fields are dropped in order: the loan ends after the source is dropped, and every read holds the
/// loan. If a copy may outlive its read, because it was late or cancelled, the loan never ends.
#[derive(Debug)]
struct LentSource {
    source: Arc<dyn Source>,
    loan: Arc<Loan>,
}

/// A read of a lent source, and whether its copy may continue after the read.
struct LentRead<'a> {
    loan: &'a Arc<Loan>,
    copy_may_continue: bool,
}

impl Drop for LentRead<'_> {
    fn drop(&mut self) {
        if self.copy_may_continue {
            // Leaked, so that the memory is never reported as released: the engine does not report the end of an
            // abandoned copy, and until then the device may read the memory.
            std::mem::forget(Arc::clone(self.loan));
        }
    }
}

impl Source for LentSource {
    fn len_bytes(&self) -> u64 {
        self.source.len_bytes()
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        Box::pin(async move {
            let mut reading = LentRead { loan: &self.loan, copy_may_continue: true };
            let read = self.source.read(range).await;
            reading.copy_may_continue = matches!(read, Err(SourceError::Copy(CopyError::TimedOut { .. })));
            read
        })
    }

    fn may_change(&self) -> bool {
        true
    }

    fn slots(&self) -> Option<&SlotPool> {
        self.source.slots()
    }

    /// Whoever copies it within the device holds this source until that has ended.
    fn on_device(&self) -> Option<&OnDevice> {
        self.source.on_device()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use tensor_relay_device::{Capacity, HostEngine, HostMemory};
    use tensor_relay_protocol::{ChunkHash, CodecId, Cuts, Dtype, Limits, Shape, TensorName};
    use tensor_relay_transport::egress::Encoder;

    const CHUNK_BYTES: u32 = 1024;

    /// A device whose copies fail with this error, or never end.
    #[derive(Debug)]
    struct Failing(Option<fn() -> CopyError>);

    impl Source for Failing {
        fn len_bytes(&self) -> u64 {
            8
        }

        fn read(&self, _: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
            Box::pin(async move {
                match self.0 {
                    Some(error) => Err::<Bytes, SourceError>(error().into()),
                    None => std::future::pending().await,
                }
            })
        }
    }

    fn new_staging(budget_bytes: u64) -> Staging {
        Staging {
            memory: HostMemory::new(budget_bytes),
            bases: Arc::default(),
            layouts: Arc::default(),
            chunk_bytes: CHUNK_BYTES,
            limits: Limits::default(),
            workers: Workers::Threads,
        }
    }

    fn new_device() -> Device {
        let engine = Arc::new(HostEngine::new(HostMemory::new(1 << 20)).unwrap());
        Device::new(engine, Capacity { slots: 4, slot_bytes: CHUNK_BYTES as usize }).unwrap()
    }

    fn spec(name: &str, bytes: u64) -> TensorSpec {
        TensorSpec::new(TensorName::new(name).unwrap(), Dtype::U8, Shape::new(&[bytes]).unwrap())
    }

    /// A matrix in columns.
    fn columns() -> TensorSpec {
        TensorSpec {
            shape: Shape::new(&[50, 60]).unwrap(),
            cuts: Cuts::equal(1, 60, 4),
            ..spec("columns", 3000)
        }
    }

    /// Fills memory with the content of the tensor with this number.
    fn fill(number: u8, out: &mut [u8]) {
        out.iter_mut()
            .zip(0u64..)
            .for_each(|(byte, at)| *byte = (at * 7) as u8 ^ number);
    }

    /// Memory of `bytes` bytes on `device`, with the content of the tensor with this number.
    async fn buffer(device: &Device, bytes: u64, number: u8) -> DeviceBuffer {
        let buffer = device.allocate(bytes as usize).unwrap();
        let sink = buffer.sink();
        let mut target = sink.open(0..bytes).await.unwrap();
        fill(number, &mut target);
        sink.write(target).await.unwrap();
        buffer
    }

    async fn tensors(device: &Device) -> Vec<(TensorSpec, DeviceBuffer)> {
        let alias = TensorSpec { alias_of: Some(2), ..spec("tied", 5000) };
        vec![
            (spec("small", 3), buffer(device, 3, 1).await),
            (spec("none", 0), device.allocate(0).unwrap()),
            (spec("large", 5000), buffer(device, 5000, 2).await),
            (alias, device.allocate(0).unwrap()),
            (spec("middle", 700), buffer(device, 700, 3).await),
            (columns(), buffer(device, 3000, 4).await),
        ]
    }

    /// The same version, staged from the host.
    fn staged() -> Staged {
        let specs = vec![
            spec("small", 3),
            spec("none", 0),
            spec("large", 5000),
            TensorSpec { alias_of: Some(2), ..spec("tied", 5000) },
            spec("middle", 700),
            columns(),
        ];
        let fill = |index: usize, out: &mut [u8]| {
            fill([1, 0, 2, 0, 3, 4][index], out);
            Ok::<(), Infallible>(())
        };
        Staged::new(&new_staging(1 << 20), specs, vec![], fill).unwrap()
    }

    async fn digest(held: &Publishable) -> tensor_relay_protocol::VersionDigest {
        let encoder = Encoder::new(0, None, Workers::Inline);
        for (chunk, _) in held.manifest().chunking().iter() {
            encoder.encode(&held.payload, chunk, CodecId::Raw).await.unwrap();
        }
        held.digest().unwrap()
    }

    #[tokio::test]
    async fn the_digest_does_not_depend_on_where_tensors_were() {
        let (device, expected) = (new_device(), staged().hash());
        let copied = Staged::from_device(&new_staging(1 << 20), tensors(&device).await, vec![])
            .await
            .unwrap();
        assert_eq!(copied.hash(), expected);
        let lent = Borrowed::from_device(&new_staging(0), tensors(&device).await, vec![]).unwrap();
        assert_eq!(digest(&lent.into()).await, expected);
        let uploaded = copied.onto(&device).await.unwrap();
        assert_eq!(uploaded.digest(), Some(expected));
        let (chunk, range) = uploaded.manifest().chunking().iter().last().unwrap();
        let read = uploaded.payload.source().read(range).await.unwrap();
        assert_eq!(ChunkHash::of(&read), uploaded.payload.hashes().unwrap()[chunk.0 as usize]);
        drop(read);
        assert_eq!(device.slots().available(), 4);
    }

    #[tokio::test]
    async fn moving_onto_a_device_frees_host_memory() {
        let (device, staging) = (new_device(), new_staging(1 << 20));
        let copied = Staged::from_device(&staging, tensors(&device).await, vec![]).await.unwrap();
        assert!(staging.memory.stats().in_use_bytes > 0);
        let _held = copied.onto(&device).await.unwrap();
        assert_eq!(staging.memory.stats().in_use_bytes, 0);
    }

    /// Goal: a device without copies within it stages in host memory, and another device gets the version by way of that.
    #[tokio::test]
    async fn other_devices_stage_by_way_of_the_host() {
        let (device, other, staging) = (new_device(), new_device(), new_staging(1 << 20));
        for (on, is_on_host) in [(Some(&device), true), (None, true), (Some(&other), false)] {
            let tensors = tensors(&device).await;
            let version = Publishable::from_device(&staging, tensors, vec![], on).await.unwrap();
            assert_eq!(version.payload.source().slots().is_none(), is_on_host);
            assert_eq!(digest(&version).await, staged().hash());
        }
    }

    #[tokio::test]
    async fn versions_without_bytes_are_valid() {
        let (device, staging) = (new_device(), new_staging(0));
        for tensors in [vec![], vec![(spec("none", 0), device.allocate(0).unwrap())]] {
            let copied = Staged::from_device(&staging, tensors.clone(), vec![]).await.unwrap();
            let digest = copied.hash();
            assert_eq!(copied.onto(&device).await.unwrap().digest(), Some(digest));
            let within = Publishable::from_device(&staging, tensors.clone(), vec![], Some(&device))
                .await
                .unwrap();
            assert_eq!(within.digest(), Some(digest));
            assert_eq!(Borrowed::from_device(&staging, tensors, vec![]).unwrap().digest(), Some(digest));
        }
    }

    /// Goal: lent memory is not reported as released while a copy may still read it. Method: reads that fail before
    /// their copy begins, that are late, and that never end.
    #[tokio::test(start_paused = true)]
    async fn a_loan_never_ends_if_a_copy_may_continue() {
        let fenced = || CopyError::FenceTimedOut { device: "test".into(), waited: READ_TIMEOUT };
        let late = || CopyError::TimedOut { device: "test".into(), waited: READ_TIMEOUT };
        for (copy_error, is_over) in [
            (Some(fenced as fn() -> CopyError), true),
            (Some(late as fn() -> CopyError), false),
            (None, false),
        ] {
            let (loan, returned) = Loan::new();
            let lent = LentSource { source: Arc::new(Failing(copy_error)), loan: Arc::new(loan) };
            assert!(egress::read(&lent, 0..8).await.is_err());
            drop(lent);
            assert_eq!(returned.is_returned(), is_over);
        }
    }

    #[tokio::test]
    async fn the_error_for_an_invalid_version_names_the_tensor() {
        let (device, other) = (new_device(), new_device());
        let refused = |tensors| Borrowed::from_device(&new_staging(0), tensors, vec![]).unwrap_err();
        let error = refused(vec![(spec("t", 4), device.allocate(3).unwrap())]);
        assert!(
            matches!(&error, LendError::WrongSize { name, expected_bytes: 4, given_bytes: 3 } if **name == *"t")
        );
        let alias = TensorSpec { alias_of: Some(0), ..spec("u", 4) };
        let twice = [spec("t", 4), alias].map(|spec| (spec, device.allocate(4).unwrap()));
        let error = refused(twice.into());
        assert!(matches!(&error, LendError::AliasWithBytes { given_bytes: 4, .. }), "{error}");
        let mixed = [("t", &device), ("u", &other)]
            .map(|(name, device)| (spec(name, 4), device.allocate(4).unwrap()));
        let error = refused(mixed.into());
        assert!(matches!(&error, LendError::OtherDevice { name, .. } if **name == *"u"), "{error}");
    }

    #[tokio::test]
    async fn a_version_over_budget_is_refused_with_sizes() {
        let device = new_device();
        let refused = Staged::from_device(&new_staging(100), tensors(&device).await, vec![])
            .await
            .unwrap_err();
        assert!(matches!(refused, DeviceError::Memory(AllocError::OverBudget { .. })), "{refused}");
        let large =
            Staged::new::<Infallible>(&new_staging(4 << 20), vec![spec("t", 2 << 20)], vec![], |_, _| Ok(()));
        let refused = large.unwrap().onto(&device).await.unwrap_err();
        assert!(matches!(refused, DeviceError::Memory(AllocError::OverBudget { .. })), "{refused}");
    }
}
