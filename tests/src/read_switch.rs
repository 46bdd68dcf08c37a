//! [`ReadSwitch`]: makes reads of versions fail for a while, as a disk or a network file system does.

use crate::tensors::write_content;
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tensor_relay_device::{BoxFuture, HostSource, Source, SourceError};
use tensor_relay_protocol::{Manifest, TensorSpec};
use tensor_relay_server::{Borrowed, Server};
use tokio::time::Instant;

/// Switches the reads of its versions off and on. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ReadSwitch(Arc<State>);

#[derive(Debug, Default)]
struct State {
    is_failing: AtomicBool,
    /// The times of the first and the last failed read of each version.
    failures: Mutex<BTreeMap<u64, (Instant, Instant)>>,
}

/// A source whose reads fail while its switch is off.
#[derive(Debug)]
struct SwitchedSource {
    switch: ReadSwitch,
    version: u64,
    source: HostSource,
}

impl ReadSwitch {
    /// Lets reads fail, or succeed again.
    pub fn set_failing(&self, failing: bool) {
        self.0.is_failing.store(failing, Ordering::Relaxed);
    }

    /// The versions of which reads failed for `period` or longer, from the first failed one to the last.
    pub fn failed_for(&self, period: Duration) -> impl Iterator<Item = u64> {
        let mut failures = self.0.failures.lock().unwrap().clone();
        failures.retain(|_, (first, last)| *last - *first >= period);
        failures.into_keys()
    }

    fn record_failure(&self, version: u64) {
        let now = Instant::now();
        self.0.failures.lock().unwrap().entry(version).or_insert((now, now)).1 = now;
    }

    /// A version of `specs` with the content of `version`.
    pub fn borrow(&self, server: &Server, specs: Vec<TensorSpec>, version: u64) -> Borrowed {
        let source = |manifest: &Manifest| {
            let mut bytes = vec![0; manifest.payload_bytes() as usize];
            for tensor in manifest.tensors() {
                let range = tensor.range().expect("it is in one piece");
                write_content(
                    tensor.name.as_str(),
                    version,
                    &mut bytes[range.start as usize..range.end as usize],
                );
            }
            let source = HostSource::new(Bytes::from(bytes));
            Arc::new(SwitchedSource { switch: self.clone(), version, source }) as Arc<dyn Source>
        };
        Borrowed::from_source(&server.staging(), specs, vec![], source).unwrap()
    }
}

impl Source for SwitchedSource {
    fn len_bytes(&self) -> u64 {
        self.source.len_bytes()
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        match self.switch.0.is_failing.load(Ordering::Relaxed) {
            true => {
                self.switch.record_failure(self.version);
                let source = io::Error::from_raw_os_error(5); // EIO
                Box::pin(async move { Err(SourceError::Io { path: "a version".into(), source }) })
            }
            false => self.source.read(range),
        }
    }
}
