//! The admin status of a server.

use super::{Subject, events, families::Family, memory::DeviceMemory, server_families, server_status};
use serde_json::{Value, json};
use tensor_relay_server::{ServerStatus, StatusReader, Topic};

/// A server as the subject of an admin port.
#[derive(Debug)]
pub(crate) struct ServerSubject {
    pub(crate) reader: StatusReader,
    /// The topics named on the command line.
    pub(crate) topics: Vec<Topic>,
    pub(crate) device: DeviceMemory,
}

impl ServerSubject {
    /// The memory in use, by kind.
    fn memory(&self, status: &ServerStatus) -> Vec<(&'static str, u64)> {
        let stats = &status.stats;
        let mut memory = vec![
            ("staged", stats.staged_bytes),
            ("reusable", stats.reusable_bytes),
            ("base", stats.bases.bytes),
            ("encoded", stats.encoder.encoded_bytes),
        ];
        memory.extend(self.device.bytes());
        memory
    }
}

impl Subject for ServerSubject {
    fn readiness(&self) -> Result<(), String> {
        if self.reader.is_draining() {
            return Err("the server is draining".into());
        }
        let missing = self
            .topics
            .iter()
            .find(|topic| !self.reader.offers(std::slice::from_ref(topic)));
        missing.map_or(Ok(()), |topic| Err(format!("topic {topic} has no version on offer")))
    }

    fn status(&self) -> Value {
        let readiness = self.readiness();
        let Some(status) = self.reader.read() else {
            return json!({ "role": "server", "ready": false, "not_ready": "the server has ended" });
        };
        let mut value = server_status::as_object(&status, &self.memory(&status));
        value["ready"] = readiness.is_ok().into();
        value["not_ready"] = readiness.err().into();
        value["events"] = events::recent().into();
        value
    }

    fn families(&self) -> Vec<Family> {
        let status = self.reader.read();
        status.map_or_else(Vec::new, |status| server_families::families(&status, &self.memory(&status)))
    }
}
