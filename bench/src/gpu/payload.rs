//! Payloads on a device or on the host, in the layout of a server.

use super::engine::Engine;
use crate::noise;
use anyhow::{Context, Result};
use std::{ops::Range, sync::Arc};
use tensor_relay_device::{Capacity, Device, DeviceBuffer, HostSource, Sink, Source};
use tensor_relay_protocol::{Dtype, Limits, Manifest, Shape, Tensor, TensorName, TensorSpec};

/// A tensor size that needs no padding: a multiple of the layout's alignment.
pub(super) const UNPADDED_BYTES: u64 = 4096;

/// The specifications of `count` tensors of `bytes` each.
pub(super) fn tensors(count: u64, bytes: u64) -> Result<Vec<TensorSpec>> {
    let shape = Shape::new(&[bytes])?;
    let spec = |number| -> Result<TensorSpec> {
        let name = TensorName::new(&format!("model.layers.{number}.weight"))?;
        Ok(TensorSpec::new(name, Dtype::U8, shape.clone()))
    };
    (0..count).map(spec).collect()
}

/// The manifest of `specs`, laid out in chunks of `chunk_bytes`.
pub(super) fn manifest(specs: Vec<TensorSpec>, chunk_bytes: u64) -> Result<Arc<Manifest>> {
    let chunk_bytes = u32::try_from(chunk_bytes)?;
    Ok(Arc::new(Manifest::layout(specs, vec![], chunk_bytes, &Limits::default())?))
}

/// The memory of a payload on a device: one allocation, or one for each tensor.
#[derive(Debug, Clone)]
pub(super) struct OnDevice {
    len_bytes: u64,
    parts: Vec<(Range<u64>, DeviceBuffer)>,
}

impl OnDevice {
    /// Makes one allocation of `len_bytes`.
    pub(super) fn whole(device: &Device, len_bytes: u64) -> Result<Self> {
        let buffer = device.allocate(usize::try_from(len_bytes)?)?;
        Ok(Self { len_bytes, parts: vec![(0..len_bytes, buffer)] })
    }

    /// Makes an allocation for each tensor of `manifest`.
    pub(super) fn scattered(device: &Device, manifest: &Manifest) -> Result<Self> {
        let part = |range: Range<u64>| -> Result<_> {
            let buffer = device.allocate(usize::try_from(range.end - range.start)?)?;
            Ok((range, buffer))
        };
        let mut ranges: Vec<_> = manifest.tensors().iter().flat_map(Tensor::ranges).collect();
        ranges.sort_by_key(|range| (range.start, range.end));
        let parts = ranges.into_iter().map(part).collect::<Result<_>>()?;
        Ok(Self { len_bytes: manifest.payload_bytes(), parts })
    }

    /// The same memory, accessed through the slots of another `device` of the same `engine`.
    pub(super) fn through(&self, engine: &Engine, device: &Device) -> Result<Self> {
        let adopt = |(range, buffer): &(Range<u64>, DeviceBuffer)| -> Result<_> {
            Ok((range.clone(), engine.adopt(device, buffer)?))
        };
        Ok(Self { len_bytes: self.len_bytes, parts: self.parts.iter().map(adopt).collect::<Result<_>>()? })
    }

    /// A source that reads the payload.
    pub(super) fn source(&self) -> Result<Arc<dyn Source>> {
        Ok(self.device()?.source(self.len_bytes, self.parts.iter().cloned())?)
    }

    /// A sink that writes the payload.
    pub(super) fn sink(&self) -> Result<Arc<dyn Sink>> {
        Ok(Arc::new(self.device()?.sink(self.len_bytes, self.parts.iter().cloned())?))
    }

    /// The length of the payload.
    pub(super) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// All allocations.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &DeviceBuffer> {
        self.parts.iter().map(|(_, buffer)| buffer)
    }

    fn device(&self) -> Result<&Device> {
        let (_, first) = self.parts.first().context("a payload without tensors has no device")?;
        Ok(first.device())
    }

    /// Writes `bytes` to the payload, in pieces of the size of a slot.
    pub(super) async fn upload(&self, bytes: &[u8]) -> Result<()> {
        let slot_bytes = self.device()?.slots().slot_bytes();
        let sink = self.sink()?;
        let mut start = 0;
        for piece in bytes.chunks(slot_bytes) {
            let end = start + piece.len() as u64;
            let mut target = sink.open(start..end).await?;
            target.copy_from_slice(piece);
            sink.write(target).await?;
            start = end;
        }
        Ok(())
    }
}

/// A payload of noise on the device of `engine`, and the same payload on the host.
pub(super) async fn on_device_and_host(
    engine: &Engine,
    len_bytes: u64,
) -> Result<(OnDevice, Arc<dyn Source>)> {
    let device = engine.device(Capacity { slots: 2, slot_bytes: 4 << 20 })?;
    let bytes = noise_of(len_bytes, 0)?;
    let on_device = OnDevice::whole(&device, len_bytes)?;
    on_device.upload(&bytes).await?;
    Ok((on_device, Arc::new(HostSource::new(bytes.into()))))
}

/// Noise of `len_bytes`, different for each `key`.
pub(super) fn noise_of(len_bytes: u64, key: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(len_bytes)?];
    noise::fill(key, &mut bytes);
    Ok(bytes)
}
