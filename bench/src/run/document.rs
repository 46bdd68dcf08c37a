//! The result file; `bench/README.md` says what each number means.

use super::results::{Scenario, SceneResult};
use crate::{
    network::NetworkArgs,
    node::{
        Hold,
        order::{Introduction, Work},
    },
    origin::Origin,
};
use serde::Serialize;

/// Everything that one run found out.
#[derive(Debug, Serialize)]
pub(super) struct Document {
    pub(super) kind: &'static str,
    pub(super) version: u32,
    /// The driver's machine and build.
    #[serde(flatten)]
    pub(super) origin: Origin,
    pub(super) network: NetworkFacts,
    pub(super) workload: WorkloadFacts,
    /// The machines of the workers, the producer's first.
    pub(super) machines: Vec<Machine>,
    pub(super) results: Vec<SceneResult>,
    pub(super) memory: Vec<MemoryFacts>,
    pub(super) copies_per_byte: Copies,
}

/// What lies between producer and consumers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum NetworkFacts {
    /// This machine's own.
    Local(NetworkArgs),
    /// Whatever is between so many consumers and their producer.
    Nodes { consumers: usize },
}

/// What was asked for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct WorkloadFacts {
    pub(super) name: &'static str,
    /// Which tensors or versions, and what is in them.
    pub(super) work: Work,
    pub(super) versions_per_round: u64,
    pub(super) mode: &'static str,
    pub(super) hold: Hold,
    /// How many each consumer asked for.
    pub(super) lanes: u32,
    pub(super) rounds: u32,
    /// Rounds of each scene that came first and do not count.
    pub(super) warm_up_rounds: u32,
}

/// Where a worker ran.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Machine {
    pub(super) worker: String,
    #[serde(flatten)]
    pub(super) origin: Origin,
    /// Whether its clock is the producer's.
    pub(super) clock_of_producer: bool,
}

/// What a worker took of its machine's memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct MemoryFacts {
    pub(super) worker: String,
    pub(super) peak_resident_bytes: Option<u64>,
    /// What of that is not the tensors of one version.
    pub(super) beyond_tensors_bytes: Option<u64>,
}

/// How often the programs copy a byte on its way, by their design; kernel and network card not counted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Copies {
    /// From where it is published into a packet.
    pub(super) producer: u32,
    /// From a packet to where its user finds it.
    pub(super) consumer: u32,
}

/// Host to host, raw (`ARCHITECTURE.md`, "One chunk's journey").
pub(super) const COPIES: Copies = Copies { producer: 1, consumer: 1 };

/// The format of the file.
pub(super) const KIND: &str = "run";
pub(super) const VERSION: u32 = 1;

impl Machine {
    /// What `worker` said of its machine, which may be the producer's.
    pub(super) fn new(worker: &str, here: &Introduction, producer: &Introduction) -> Self {
        Self {
            worker: worker.into(),
            origin: here.origin.clone(),
            clock_of_producer: here.clock.is_some() && here.clock == producer.clock,
        }
    }
}

impl MemoryFacts {
    pub(super) fn new(worker: &str, peak_resident_bytes: Option<u64>, scenarios: &[Scenario]) -> Self {
        let payload_bytes = scenarios.iter().map(Scenario::payload_bytes).max().unwrap_or(0);
        Self {
            worker: worker.into(),
            peak_resident_bytes,
            beyond_tensors_bytes: peak_resident_bytes.map(|peak| peak.saturating_sub(payload_bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here(clock: Option<&str>) -> Introduction {
        Introduction { origin: Origin::here(), clock: clock.map(Into::into) }
    }

    #[test]
    fn clocks_without_a_name_are_nobodys() {
        let same = |a, b| Machine::new("w", &here(a), &here(b)).clock_of_producer;
        assert!(same(Some("x"), Some("x")));
        assert!(!same(Some("x"), Some("y")));
        assert!(!same(None, None));
    }

    #[test]
    fn the_tensors_are_no_overhead() {
        let scenario = super::super::results::tests::scenario(1.0);
        let facts = MemoryFacts::new("w", Some((1 << 30) + 5), &[scenario]);
        assert_eq!(facts.beyond_tensors_bytes, Some(5));
        assert_eq!(MemoryFacts::new("w", None, &[]).beyond_tensors_bytes, None);
    }
}
