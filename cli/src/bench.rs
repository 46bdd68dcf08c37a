//! `tensor-relay bench`: the benchmark harness, inside the measured program.

use std::process::ExitCode;
use tensor_relay_bench::{
    command::{self, BenchArgs},
    program::Program,
};

pub(crate) async fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    command::run(args, Program::current(&[crate::config::variable::BENCH])?).await?;
    Ok(ExitCode::SUCCESS)
}
