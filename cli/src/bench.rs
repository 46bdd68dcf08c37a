//! `tensor-relay bench`: the benchmark harness, inside the measured program.

use crate::exit::Exit;
use tensor_relay_bench::{
    command::{self, BenchArgs},
    program::Program,
};

pub(crate) async fn run(args: BenchArgs, program: Program) -> anyhow::Result<Exit> {
    args.lifetime.begin();
    command::run(args.command, program.with(&[crate::config::variable::BENCH])).await?;
    Ok(Exit::Done)
}
