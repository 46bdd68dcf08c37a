//! [`ReadSwitch`]: makes reads of versions fail for a while, as a disk or a network file system does.

use crate::tensors::write_content;
use bytes::Bytes;
use std::{
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use tensor_relay_device::{BoxFuture, HostSource, Source, SourceError};
use tensor_relay_protocol::{Manifest, TensorSpec};
use tensor_relay_server::{Borrowed, Server};

/// Switches the reads of its versions off and on. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ReadSwitch(Arc<AtomicBool>);

/// A source whose reads fail while its switch is off.
#[derive(Debug)]
struct SwitchedSource {
    switch: ReadSwitch,
    source: HostSource,
}

impl ReadSwitch {
    /// Lets reads fail, or succeed again.
    pub fn set_failing(&self, failing: bool) {
        self.0.store(failing, Ordering::Relaxed);
    }

    /// A version of `specs` with the content of `version`.
    pub fn borrow(&self, server: &Server, specs: Vec<TensorSpec>, version: u64) -> Borrowed {
        let source = |manifest: &Manifest| {
            let mut bytes = vec![0; manifest.payload_bytes() as usize];
            for tensor in manifest.tensors() {
                let range = tensor.range();
                write_content(
                    tensor.name.as_str(),
                    version,
                    &mut bytes[range.start as usize..range.end as usize],
                );
            }
            let source = HostSource::new(Bytes::from(bytes));
            Arc::new(SwitchedSource { switch: self.clone(), source }) as Arc<dyn Source>
        };
        Borrowed::from_source(&server.staging(), specs, vec![], source).unwrap()
    }
}

impl Source for SwitchedSource {
    fn len_bytes(&self) -> u64 {
        self.source.len_bytes()
    }

    fn read(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        match self.switch.0.load(Ordering::Relaxed) {
            true => {
                let source = io::Error::from_raw_os_error(5); // EIO
                Box::pin(async move { Err(SourceError::Io { path: "a version".into(), source }) })
            }
            false => self.source.read(range),
        }
    }
}
