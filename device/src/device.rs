use std::{any::Any, fmt, ops::Range, sync::Arc};

use crate::{
    engine::CopyEngine,
    engine_sink::EngineSink,
    engine_source::EngineSource,
    host_memory::AllocError,
    on_device::{DeviceSource, OnDevice},
    parts::PartsError,
    pool::{Capacity, SlotPool},
    sink::Sink,
    source::Source,
    spread_parts::SpreadParts,
};

/// A device that holds tensors: a copy engine of any kind, with its slots.
///
/// Why: servers and clients of tensors need no code for GPUs. A program makes the device, with one line that names its
/// kind, and passes it to them. A clone is cheap and is the same device.
///
/// ```
/// use std::sync::Arc;
/// use tensor_relay_device::{Capacity, Device, HostEngine, HostMemory};
///
/// let engine = Arc::new(HostEngine::new(HostMemory::new(1 << 30))?);
/// let device = Device::new(engine, Capacity { slots: 8, slot_bytes: 4 << 20 })?;
/// assert_eq!(device.allocate(1000)?.len_bytes(), 1000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Device {
    any: Arc<dyn AnyDevice>,
}

impl Device {
    /// The device of `engine`, with slots of its own. May block while the slots are page-locked (about a third of a
    /// second for each GiB). Fails when the slots cannot be allocated.
    pub fn new<E: CopyEngine>(engine: Arc<E>, capacity: Capacity) -> Result<Self, AllocError> {
        let slots = engine.slots(capacity)?;
        Ok(Self { any: Arc::new(Typed { engine, slots }) })
    }

    /// A short name for messages and metrics: `host`, `cuda:0`.
    pub fn name(&self) -> &str {
        self.any.name()
    }

    /// The slots for all copies from and to this device.
    pub fn slots(&self) -> &SlotPool {
        self.any.slots()
    }

    /// The engine, if it is an `E`.
    pub fn engine<E: CopyEngine>(&self) -> Option<&Arc<E>> {
        let typed = self.any.as_any().downcast_ref::<Typed<E>>()?;
        Some(&typed.engine)
    }

    /// Allocates `len` bytes of the device's memory, of unspecified content. May block for milliseconds. Fails when
    /// there is no room; the error has the number of free bytes.
    pub fn allocate(&self, len: usize) -> Result<DeviceBuffer, AllocError> {
        let (memory, len_bytes) = self.any.allocate(len)?;
        Ok(DeviceBuffer { device: self.clone(), memory, len_bytes })
    }

    /// Makes a buffer of memory that this device's engine allocated or was lent; `None` if the engine is not an `E`.
    pub fn wrap<E: CopyEngine>(&self, memory: Arc<E::Memory>) -> Option<DeviceBuffer> {
        let len_bytes = self.engine::<E>()?.memory_len(&memory);
        Some(DeviceBuffer { device: self.clone(), memory, len_bytes })
    }

    /// A source of a payload of `len_bytes` in `parts`: the range of each in the payload, and its memory, which must be
    /// this device's. Bytes between the parts are read as zeros. Fails unless the parts are sorted, disjoint, within
    /// the payload, and each as long as its memory.
    pub fn source(
        &self,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, DeviceBuffer)>,
    ) -> Result<Arc<dyn Source>, PartsError> {
        self.spread_source(len_bytes, parts, SpreadParts::default())
    }

    /// Like [`source`](Self::source), with parts that lie spread over memories. Where parts overlap, their bytes must be
    /// the same.
    pub fn spread_source(
        &self,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, DeviceBuffer)>,
        spread: SpreadParts<DeviceBuffer>,
    ) -> Result<Arc<dyn Source>, PartsError> {
        let parts: Vec<_> = parts.into_iter().collect();
        let is_spread = !spread.memories().is_empty();
        let source =
            self.any
                .source(len_bytes, self.own(parts.iter().cloned())?, self.own_spread(spread)?)?;
        if is_spread {
            return Ok(source);
        }
        let on_device = OnDevice::new(self.clone(), len_bytes, parts);
        Ok(Arc::new(DeviceSource { source, on_device }))
    }

    /// A sink of a payload of `len_bytes` in `parts`, as for [`source`](Self::source). Bytes between the parts are
    /// dropped. Keep the buffers: they are the result.
    pub fn sink(
        &self,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, DeviceBuffer)>,
    ) -> Result<EngineSink, PartsError> {
        self.spread_sink(len_bytes, parts, SpreadParts::default())
    }

    /// Like [`sink`](Self::sink), with parts that lie spread over memories.
    pub fn spread_sink(
        &self,
        len_bytes: u64,
        parts: impl IntoIterator<Item = (Range<u64>, DeviceBuffer)>,
        spread: SpreadParts<DeviceBuffer>,
    ) -> Result<EngineSink, PartsError> {
        self.any.sink(len_bytes, self.own(parts)?, self.own_spread(spread)?)
    }

    /// Whether both are the same device.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.any, &other.any)
    }

    fn own(
        &self,
        parts: impl IntoIterator<Item = (Range<u64>, DeviceBuffer)>,
    ) -> Result<Vec<Part>, PartsError> {
        let own_part = |(range, buffer): (Range<u64>, DeviceBuffer)| match self.is(&buffer.device) {
            true => Ok((range, buffer.memory)),
            false => Err(PartsError::ForeignDevice { start: range.start, end: range.end }),
        };
        parts.into_iter().map(own_part).collect()
    }

    fn own_spread(&self, spread: SpreadParts<DeviceBuffer>) -> Result<SpreadParts<AnyMemory>, PartsError> {
        spread.try_map(|buffer| match self.is(&buffer.device) {
            true => Some(buffer.memory),
            false => None,
        })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name())
            .field("slots", self.slots())
            .finish()
    }
}

/// Memory on a [`Device`]. Clones share the memory. It goes back to the engine, or to its owner if it was lent, when
/// the last clone is dropped and the last copy has ended.
#[derive(Clone)]
pub struct DeviceBuffer {
    device: Device,
    memory: AnyMemory,
    len_bytes: u64,
}

impl DeviceBuffer {
    /// Its size.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A source of all its bytes.
    pub fn source(&self) -> Arc<dyn Source> {
        let whole = [(0..self.len_bytes, self.clone())];
        self.device
            .source(self.len_bytes, whole)
            .expect("one part is the whole payload")
    }

    /// A sink for all its bytes.
    pub fn sink(&self) -> Arc<dyn Sink> {
        let whole = [(0..self.len_bytes, self.clone())];
        Arc::new(self.device.sink(self.len_bytes, whole).expect("one part is the whole payload"))
    }

    /// The memory as the engine's own type, for properties that only that kind of device has: addresses, streams,
    /// events. `None` if it is not an `M`.
    pub fn memory<M: Any + Send + Sync>(&self) -> Option<Arc<M>> {
        Arc::clone(&self.memory).downcast().ok()
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("device", &self.device.name())
            .field("len_bytes", &self.len_bytes)
            .finish()
    }
}

/// Memory of an engine, whose type only [`Typed`] knows.
type AnyMemory = Arc<dyn Any + Send + Sync>;

/// A range of a payload, and its memory.
type Part<M = dyn Any + Send + Sync> = (Range<u64>, Arc<M>);

/// The operations of a device with an engine of any type.
trait AnyDevice: Send + Sync {
    fn name(&self) -> &str;
    fn slots(&self) -> &SlotPool;
    fn as_any(&self) -> &dyn Any;
    /// Allocates memory, and returns it with its length.
    fn allocate(&self, len: usize) -> Result<(AnyMemory, u64), AllocError>;
    fn source(
        &self,
        len_bytes: u64,
        parts: Vec<Part>,
        spread: SpreadParts<AnyMemory>,
    ) -> Result<Arc<dyn Source>, PartsError>;
    fn sink(
        &self,
        len_bytes: u64,
        parts: Vec<Part>,
        spread: SpreadParts<AnyMemory>,
    ) -> Result<EngineSink, PartsError>;
}

/// A device of a known engine type.
struct Typed<E> {
    engine: Arc<E>,
    slots: SlotPool,
}

impl<E: CopyEngine> AnyDevice for Typed<E> {
    fn name(&self) -> &str {
        self.engine.name()
    }

    fn slots(&self) -> &SlotPool {
        &self.slots
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn allocate(&self, len: usize) -> Result<(AnyMemory, u64), AllocError> {
        let memory = self.engine.allocate(len)?;
        let len_bytes = self.engine.memory_len(&memory);
        Ok((memory, len_bytes))
    }

    fn source(
        &self,
        len_bytes: u64,
        parts: Vec<Part>,
        spread: SpreadParts<AnyMemory>,
    ) -> Result<Arc<dyn Source>, PartsError> {
        let (engine, slots) = (Arc::clone(&self.engine), self.slots.clone());
        let (parts, spread) = (typed::<E>(parts)?, typed_spread::<E>(spread)?);
        Ok(Arc::new(EngineSource::spread(engine, len_bytes, parts, spread, slots)?))
    }

    fn sink(
        &self,
        len_bytes: u64,
        parts: Vec<Part>,
        spread: SpreadParts<AnyMemory>,
    ) -> Result<EngineSink, PartsError> {
        let (engine, slots) = (Arc::clone(&self.engine), self.slots.clone());
        EngineSink::spread(engine, len_bytes, typed::<E>(parts)?, typed_spread::<E>(spread)?, slots)
    }
}

/// Downcasts each part's memory.
fn typed<E: CopyEngine>(parts: Vec<Part>) -> Result<Vec<Part<E::Memory>>, PartsError> {
    let downcast = |(range, memory): Part| match memory.downcast() {
        Ok(memory) => Ok((range, memory)),
        Err(_) => Err(PartsError::ForeignDevice { start: range.start, end: range.end }),
    };
    parts.into_iter().map(downcast).collect()
}

/// Downcasts each memory of spread parts.
fn typed_spread<E: CopyEngine>(
    spread: SpreadParts<AnyMemory>,
) -> Result<SpreadParts<Arc<E::Memory>>, PartsError> {
    spread.try_map(|memory| memory.downcast().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostEngine, HostEngineMemory, HostMemory};

    fn new_device() -> Device {
        let engine = Arc::new(HostEngine::inline(HostMemory::new(1 << 20)));
        Device::new(engine, Capacity { slots: 2, slot_bytes: 64 }).unwrap()
    }

    async fn fill(sink: &dyn Sink, range: Range<u64>, byte: u8) {
        let mut target = sink.open(range).await.unwrap();
        target.fill(byte);
        sink.write(target).await.unwrap();
    }

    #[tokio::test]
    async fn a_payload_lies_in_several_buffers() {
        let device = new_device();
        let buffers = [10, 20].map(|len| device.allocate(len).unwrap());
        let parts = || [(0..10, buffers[0].clone()), (16..36, buffers[1].clone())];
        let sink = device.sink(40, parts()).unwrap();
        fill(&sink, 0..40, 7).await;
        fill(&sink, 5..20, 8).await;
        let read = device.source(40, parts()).unwrap().read(0..40).await.unwrap();
        let expected = [vec![7; 5], vec![8; 5], vec![0; 6], vec![8; 4], vec![7; 16], vec![0; 4]].concat();
        assert_eq!(read[..], expected);
        assert_eq!(buffers[1].source().read(0..5).await.unwrap()[..], [8, 8, 8, 8, 7]);
    }

    #[test]
    fn memory_of_another_device_is_refused() {
        let (mine, other) = (new_device(), new_device());
        let parts = [(8..12, other.allocate(4).unwrap())];
        let refused = mine.source(12, parts.clone()).unwrap_err();
        assert_eq!(refused, PartsError::ForeignDevice { start: 8, end: 12 });
        assert_eq!(mine.sink(12, parts).unwrap_err(), PartsError::ForeignDevice { start: 8, end: 12 });
    }

    #[test]
    fn a_buffer_is_as_long_as_its_memory() {
        let device = new_device();
        let engine = device.engine::<HostEngine>().unwrap();
        let buffer = device.wrap::<HostEngine>(engine.allocate(33).unwrap()).unwrap();
        assert_eq!((buffer.len_bytes(), buffer.device().name()), (33, "host"));
        assert!(buffer.memory::<HostEngineMemory>().is_some() && buffer.memory::<u8>().is_none());
        assert!(device.source(33, [(0..32, buffer)]).is_err());
    }
}
