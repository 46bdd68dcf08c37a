//! The content of the result file beside the tables; `bench/README.md` explains each number.

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

/// The machines, the settings and every round.
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
    /// This machine's own.
    Local(NetworkArgs),
    /// Whatever is between so many consumers and their producer.
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
    /// Rounds of each scene that came first and do not count.
    pub(super) warm_up_rounds: u32,
}

/// The machine of a worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Machine {
    pub(super) worker: String,
    #[serde(flatten)]
    pub(super) origin: Origin,
    /// Whether its clock is the producer's.
    pub(super) clock_of_producer: bool,
}

/// The copies of each byte by the programs' design; kernel and network card not counted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Copies {
    /// From where it is published into a packet.
    pub(super) producer: u32,
    /// From a packet to where its user finds it.
    pub(super) consumer: u32,
}

/// Host to host, raw (`ARCHITECTURE.md`, "One chunk's journey").
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
    /// The machine of `worker`, which may be the producer's.
    pub(super) fn new(worker: &str, here: &Introduction, producer: &Introduction) -> Self {
        Self {
            worker: worker.into(),
            origin: here.origin.clone(),
            clock_of_producer: here.clock.is_some() && here.clock == producer.clock,
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
}
