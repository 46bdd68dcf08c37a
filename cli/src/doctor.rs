//! `tensor-relay doctor`: diagnoses this machine, this container and the path to a server.
//!
//! Each group of checks is a file. A check returns a [`Finding`], and leaves the system unchanged.

mod cgroup;
mod finding;
mod gpu;
mod memory;
mod network;
mod peers;
mod processor;
mod rate;
mod server;

use crate::{
    args::DoctorArgs,
    exit::Exit,
    output::{print_json, print_line},
    ticket,
};
use cgroup::Cgroup;
use finding::{Finding, Fix, State};
use serde_json::json;

pub(crate) async fn run(args: DoctorArgs) -> anyhow::Result<Exit> {
    let ticket = args.ticket.as_deref().map(ticket::read_any).transpose()?;
    // Queries of drivers may take a second.
    let mut findings = tokio::task::spawn_blocking(local_findings).await?;
    if let Some(ticket) = &ticket {
        let identity = args.identity.load()?;
        findings.extend(server::check(ticket, identity.clone()).await);
        if ticket.socket().is_none() {
            findings.extend(peers::check(ticket, identity).await);
        }
    }
    let count = |state| findings.iter().filter(|finding| finding.state == state).count();
    let failures = count(State::Fail);
    match args.json {
        true => print_json(&json!({
            "findings": findings,
            "ok": count(State::Ok),
            "warnings": count(State::Warn),
            "failures": failures,
        })),
        false => findings.iter().flat_map(as_text).for_each(|line| print_line(&line)),
    }
    Ok(if failures > 0 { Exit::Failed } else { Exit::Done })
}

/// All findings about this machine and this container.
fn local_findings() -> Vec<Finding> {
    let cgroup = Cgroup::own();
    let mut findings = gpu::check();
    findings.push(memory::check(&cgroup));
    findings.extend(network::check());
    findings.extend(processor::check(&cgroup));
    findings
}

/// The lines of one finding: the measured value and, unless the state is `Ok`, the expected value and the fixes.
fn as_text(finding: &Finding) -> Vec<String> {
    let Finding { name, state, measured, wanted, fix } = finding;
    let state = format!("{state:?}").to_lowercase();
    let mut lines = vec![format!("{state:4}  {name:20}  {measured}")];
    if let Some(Fix { host, docker, kubernetes }) = fix {
        let hints =
            [("wanted", wanted.as_str()), ("host", host), ("Docker", docker), ("Kubernetes", kubernetes)];
        lines.extend(hints.map(|(what, hint)| format!("{:28}{what}: {hint}", "")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_printed_with_its_fixes() {
        let good = Finding::ok("clock", "2026", "a date");
        assert_eq!(as_text(&good), ["ok    clock                 2026"]);
        let fix = Fix { host: "a", docker: "b", kubernetes: "c" };
        let bad = Finding::new("clock", State::Fail, "1970", "a date", fix);
        let lines = as_text(&bad);
        assert!(lines[0].starts_with("fail  clock") && lines[1].ends_with("wanted: a date"), "{lines:?}");
        assert!(lines[2].ends_with("host: a") && lines[3].ends_with("Docker: b"), "{lines:?}");
        assert_eq!((&json!(bad)["state"], &json!(bad)["fix"]["host"]), (&json!("fail"), &json!("a")));
        assert_eq!(json!(good)["fix"], json!(null));
    }
}
