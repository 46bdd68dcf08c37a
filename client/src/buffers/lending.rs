//! Lends buffers to the session and reclaims them.

use super::{Buffers, Expected};
use crate::destination::LentBuffer;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tensor_relay_device::{DeviceBuffer, GiveBack, Lock, Region};
use tensor_relay_protocol::{Selection, TensorName, VersionId};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

impl<B: AsMut<[u8]> + Send + 'static> Buffers<B> {
    /// Lends every buffer to the session; the `Lender` reclaims them.
    pub(crate) fn lend(self) -> (Lent, Lender<B>) {
        let writing = Arc::new(Writing::default());
        let (mut tensors, mut owners) = (Vec::with_capacity(self.len()), Vec::with_capacity(self.len()));
        for (name, buffer) in self.by_name {
            let (region, owner) = Region::lent_by(buffer);
            tensors.push((name.clone(), region));
            owners.push((name, ReturnPath::Host(owner)));
        }
        let (memory, expected) = (LentMemory::Host(tensors), self.expected);
        let lent = Lent { memory, expected: Arc::clone(&expected), writing: Arc::clone(&writing) };
        (lent, Lender { owners, expected, writing })
    }
}

impl Buffers<DeviceBuffer> {
    /// Lends buffers on a device.
    pub(crate) fn lend_on_device(self) -> (Lent, Lender<DeviceBuffer>) {
        let writing = Arc::new(Writing::default());
        let (mut tensors, mut owners) = (Vec::with_capacity(self.len()), Vec::with_capacity(self.len()));
        for (name, buffer) in self.by_name {
            let (lent_buffer, returned) = LentBuffer::lend(buffer);
            tensors.push((name.clone(), lent_buffer));
            owners.push((name, ReturnPath::Device(returned)));
        }
        let (memory, expected) = (LentMemory::Device(tensors), self.expected);
        let lent = Lent { memory, expected: Arc::clone(&expected), writing: Arc::clone(&writing) };
        (lent, Lender { owners, expected, writing })
    }
}

/// Lent buffers. They are returned to their owner when this, and everything made from it, is dropped.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) memory: LentMemory,
    pub(crate) expected: Arc<Expected>,
    pub(crate) writing: Arc<Writing>,
}

/// The buffers, by tensor name.
#[derive(Debug)]
pub(crate) enum LentMemory {
    /// In host memory.
    Host(Vec<(TensorName, Region)>),
    /// On a device.
    Device(Vec<(TensorName, Arc<LentBuffer>)>),
}

impl Lent {
    /// Gives back the buffers that no tensor is received into.
    pub(crate) fn retain_wanted(&mut self, selection: &Selection) {
        let wants = |name: &TensorName| self.expected.wants(selection, name.as_str());
        match &mut self.memory {
            LentMemory::Host(tensors) => tensors.retain(|(name, _)| wants(name)),
            LentMemory::Device(tensors) => tensors.retain(|(name, _)| wants(name)),
        }
    }

    /// The name and length of each buffer.
    pub(crate) fn sizes(&self) -> Vec<(&str, u64)> {
        match &self.memory {
            LentMemory::Host(tensors) => tensors
                .iter()
                .map(|(name, region)| (name.as_str(), region.len() as u64))
                .collect(),
            LentMemory::Device(tensors) => {
                let sizes = tensors.iter().map(|(name, lent)| (name.as_str(), lent.buffer().len_bytes()));
                sizes.collect()
            }
        }
    }
}

/// Reclaims lent buffers.
#[derive(Debug)]
pub(crate) struct Lender<B> {
    owners: Vec<(TensorName, ReturnPath<B>)>,
    expected: Arc<Expected>,
    writing: Arc<Writing>,
}

/// Reclaims one buffer.
#[derive(Debug)]
enum ReturnPath<B> {
    /// Always returned, when its bytes are no longer referenced.
    Host(GiveBack<B>),
    /// Returned when no copy to it is in flight; never if that is unknown.
    Device(oneshot::Receiver<B>),
}

impl<B> ReturnPath<B> {
    /// The buffer, if it was returned already, which is usual. Does not wait.
    fn try_take(&mut self) -> Option<B> {
        match self {
            Self::Host(owner) => owner.try_take(),
            Self::Device(returned) => returned.try_recv().ok(),
        }
    }

    /// Waits for the buffer; on a device, until `deadline`.
    async fn wait(&mut self, deadline: Instant) -> Option<B> {
        match self {
            Self::Host(owner) => owner.wait().await,
            // The sender was dropped: the buffer is withheld.
            Self::Device(returned) if returned.is_terminated() => None,
            Self::Device(returned) => timeout_at(deadline, returned).await.ok()?.ok(),
        }
    }
}

/// The deadline for a device to end its copies to lent buffers, before these are withheld. Longer than the deadline of
/// one copy, 25 s (`COPY_TIMEOUT` of the device's sink).
const COPIES_TIMEOUT: Duration = Duration::from_secs(30);

impl<B> Lender<B> {
    /// Waits until each buffer is returned or withheld; gives the returned ones, and the names of the withheld ones.
    pub(crate) async fn reclaim(mut self) -> (Buffers<B>, Vec<TensorName>) {
        let deadline = Instant::now() + COPIES_TIMEOUT;
        let (mut by_name, mut withheld) = (BTreeMap::new(), vec![]);
        for (name, owner) in &mut self.owners {
            let mut buffer = owner.try_take();
            if buffer.is_none() {
                buffer = owner.wait(deadline).await;
            }
            match buffer {
                Some(buffer) => drop(by_name.insert(name.clone(), buffer)),
                None => withheld.push(name.clone()),
            }
        }
        (Buffers { by_name, expected: self.expected }, withheld)
    }

    pub(crate) fn writing(&self) -> Arc<Writing> {
        Arc::clone(&self.writing)
    }
}

/// The record of the first version written to lent buffers. Unless it was committed, the buffers count as torn.
#[derive(Debug, Default)]
pub(crate) struct Writing(Lock<Option<VersionId>>);

impl Writing {
    /// Records that bytes of `id` may be in the buffers from now on.
    pub(crate) fn begin(&self, id: &VersionId) {
        self.0.lock().get_or_insert_with(|| id.clone());
    }

    /// The first version whose bytes may be in the buffers; `None` if nothing was written to them.
    pub(crate) fn version(&self) -> Option<VersionId> {
        self.0.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> TensorName {
        TensorName::new(name).unwrap()
    }

    #[tokio::test]
    async fn buffers_are_returned_with_their_bytes_and_without_a_copy() {
        let buffers: Buffers<Vec<u8>> = [(name("a"), vec![0; 4]), (name("b"), vec![])].into_iter().collect();
        let address = buffers.get("a").unwrap().as_ptr();
        let (mut lent, lender) = buffers.lend();
        let LentMemory::Host(tensors) = &mut lent.memory else { panic!("they are on the host") };
        tensors[0].1.copy_from_slice(&[1, 2, 3, 4]);
        drop(lent);
        let (buffers, withheld) = lender.reclaim().await;
        assert!(withheld.is_empty());
        assert_eq!(buffers.get("a").unwrap(), &[1, 2, 3, 4]);
        assert_eq!((buffers.get("a").unwrap().as_ptr(), buffers.len()), (address, 2));
    }
}
