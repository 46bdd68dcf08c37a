//! The details of a run's result file, besides its tables; `bench/README.md` explains each number.

use super::results::Sample;
use crate::{
    network::NetworkArgs,
    node::{
        Hold,
        order::{Introduction, Work},
    },
    origin::Origin,
};
use serde::Serialize;
use std::fmt;

/// The details of a run: the settings, the machines and every round.
#[derive(Debug, Serialize)]
pub(super) struct Details {
    pub(super) network: NetworkFacts,
    pub(super) workload: WorkloadFacts,
    /// The machines of the workers, the producer's first.
    pub(super) machines: Vec<Machine>,
    pub(super) rounds: Vec<Sample>,
    pub(super) copies_per_byte: Copies,
}

/// The network between producer and consumers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum NetworkFacts {
    /// A network on this machine.
    Local(NetworkArgs),
    /// The network between the producer's node and those of the consumers; `consumers` is the number of consumers.
    Nodes { consumers: usize },
}

/// The requested settings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct WorkloadFacts {
    pub(super) name: &'static str,
    /// The tensors or versions, and their content.
    pub(super) work: Work,
    pub(super) versions_per_round: u64,
    pub(super) mode: &'static str,
    pub(super) hold: Hold,
    /// The number of lanes that each consumer requested.
    pub(super) lanes: u32,
    pub(super) rounds: u32,
    /// The number of uncounted first rounds of each scene.
    pub(super) warm_up_rounds: u32,
}

/// The machine of a worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Machine {
    pub(super) worker: String,
    #[serde(flatten)]
    pub(super) origin: Origin,
    /// Whether its monotonic clock is also the producer's.
    pub(super) clock_of_producer: bool,
}

/// The number of times that the programs copy each byte, by design. Copies by the kernel and the network card are not
/// counted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Copies {
    /// From the published memory into a packet.
    pub(super) producer: u32,
    /// From a packet into the snapshot's memory.
    pub(super) consumer: u32,
}

/// The copies of raw chunks from host to host (`ARCHITECTURE.md`, "One chunk's journey").
pub(super) const COPIES: Copies = Copies { producer: 1, consumer: 1 };

impl fmt::Display for NetworkFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(network) => network.fmt(f),
            Self::Nodes { consumers: 1 } => write!(f, "the network between two nodes"),
            Self::Nodes { consumers } => write!(f, "the network between a node and {consumers} consumers"),
        }
    }
}

impl Machine {
    /// The machine of `worker`, from its `introduction` and the producer's.
    pub(super) fn new(worker: &str, introduction: &Introduction, producer: &Introduction) -> Self {
        Self {
            worker: worker.into(),
            origin: introduction.origin.clone(),
            clock_of_producer: introduction.clock.is_some() && introduction.clock == producer.clock,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction(clock: Option<&str>) -> Introduction {
        Introduction { origin: Origin::here(), clock: clock.map(Into::into) }
    }

    #[test]
    fn clocks_without_an_identifier_are_not_shared() {
        let same = |a, b| Machine::new("w", &introduction(a), &introduction(b)).clock_of_producer;
        assert!(same(Some("x"), Some("x")));
        assert!(!same(Some("x"), Some("y")));
        assert!(!same(None, None));
    }
}
