//! The benchmark suite for GPUs, run on the fake driver: it completes and writes its documents. Its numbers mean
//! nothing here, and are not checked.

use serde_json::Value;
use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};
use tensor_relay_tests::{
    fake_cuda::{Installed, Library},
    skip,
};

/// Goal: one command runs all measurements, and its documents say that they are not from a GPU. Method: the script with
/// `--quick` on the fake driver, from another folder.
#[test]
fn the_suite_completes_on_the_fake_driver() {
    let out = tempfile::tempdir().unwrap();
    let fake = Installed::new(Library::Fake);
    let output = suite(out.path(), &["--quick", "--limit-s=120"])
        .envs(fake.environment())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let (document, text) = documents(out.path(), "FAKE-quick");
    assert_eq!(document["is_result"], false);
    assert!(document["title"].as_str().unwrap().starts_with("FAKE: "), "{}", document["title"]);
    assert!(text.starts_with("# FAKE: ") && text.contains("**This is no result.**"), "{text}");
    assert!(String::from_utf8_lossy(&output.stdout).starts_with(&text), "the document is printed too");
    let parts = document["parts"].as_array().unwrap();
    let names: Vec<&str> = parts.iter().map(|part| part["part"].as_str().unwrap()).collect();
    let expected =
        ["device", "cases", "loopback", "small", "fan-out", "exact", "sharing", "takers", "fault", "program"];
    assert_eq!(names, expected);
    for part in parts {
        assert_eq!(part["failure"], Value::Null, "{part}");
        assert!(part["checks"].as_array().unwrap().iter().all(|check| check["passed"] == true), "{part}");
    }
    assert!(
        document["device"]["plain D2H, page-locked"]
            .as_str()
            .unwrap()
            .ends_with(" GB/s"),
        "{document}"
    );
    for (table, column) in [
        ("loopback", "efficiency"),
        ("small tensors", "gb_per_s"),
        ("fan-out", "gb_per_s"),
        ("copies within the device", "gb_per_s"),
        ("takers", "gb_per_s"),
    ] {
        let row = &table_of(parts, table)["rows"][0];
        assert!(row["measured"][column]["median"].as_f64().unwrap() > 0.0, "{table}: {row}");
    }
}

/// Goal: memory exported as a descriptor reaches a process in namespaces of its own, as in another container. Method: the
/// part `sharing` on the fake driver, whose IPC handles stay within a PID namespace, unlike those of driver 580.
#[test]
fn descriptors_of_gpu_memory_reach_other_namespaces() {
    let out = tempfile::tempdir().unwrap();
    let fake = Installed::new(Library::Fake);
    let output = suite(out.path(), &["--quick", "--parts=sharing"])
        .envs(fake.environment())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let (document, _) = documents(out.path(), "FAKE-quick");
    let notes = document["parts"][1]["notes"].as_array().unwrap();
    let notes: Vec<&str> = notes.iter().map(|note| note.as_str().unwrap()).collect();
    assert_eq!(notes.len(), 4, "two kinds of namespaces, each in place and as a copy: {notes:?}");
    for note in notes.iter().filter(|note| note.contains("as a copy")) {
        match note.contains("unshare") {
            true => skip("this process may not create a namespace of processes"),
            false => assert!(note.contains("bytes are equal"), "{note}"),
        }
    }
}

/// Goal: without CUDA, the documents and the exit code report the failure.
#[test]
fn the_suite_without_cuda_reports_the_failure() {
    let out = tempfile::tempdir().unwrap();
    let none = Installed::new(Library::Empty);
    let arguments = ["--quick", "--parts=cases,exact"];
    let output = suite(out.path(), &arguments).envs(none.environment()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", output_text(&output));
    let (document, text) = documents(out.path(), "FAILED-quick");
    assert_eq!(document["is_result"], false);
    let failure = document["parts"][0]["failure"].as_str().unwrap();
    assert!(failure.contains("has no function"), "{failure}");
    assert!(text.contains("**Failed**: device: "), "{text}");
}

/// Goal: results name the commit that was built, on a machine without the repository. Method: a copy of the folder with a
/// program that prints its commit.
#[test]
fn the_suite_is_told_the_commit_that_was_built() {
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::copy(script(), folder.path().join("run")).unwrap();
    std::fs::write(bin.join("commit"), "0123456789ab\n").unwrap();
    std::fs::write(bin.join("tensor-relay-bench"), "#!/bin/sh\necho \"commit=$TENSOR_RELAY_COMMIT\"\n")
        .unwrap();
    let mut command = Command::new(folder.path().join("run"));
    for variable in ["TENSOR_RELAY_BENCH", "TENSOR_RELAY_COMMIT"] {
        command.env_remove(variable);
    }
    let output = command.env("OUT", folder.path()).output().unwrap();
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("commit=0123456789ab"),
        "{}",
        output_text(&output)
    );
}

/// `bench/gpu/run`.
fn script() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "bench/gpu/run"].iter().collect()
}

/// `bench/gpu/run` with the program that cargo built.
fn suite(out: &Path, arguments: &[&str]) -> Command {
    let executable = std::env::current_exe().unwrap();
    let program = executable.ancestors().nth(2).unwrap().join("tensor-relay-bench");
    assert!(program.is_file(), "there is no {}: run tests/run, or cargo build first", program.display());
    let mut command = Command::new(script());
    command.arg("--out").arg(out).args(arguments);
    command.env("TENSOR_RELAY_BENCH", program).env_remove("OUT").current_dir("/");
    command
}

/// The JSON and Markdown documents of the only run in `out`, whose file names end with `name` after the date.
fn documents(out: &Path, name: &str) -> (Value, String) {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(out).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let [json, markdown] = &paths[..] else { panic!("one run writes two documents: {paths:?}") };
    for (path, suffix) in [(json, "json"), (markdown, "md")] {
        let found = path.file_name().unwrap().to_str().unwrap();
        assert!(found.ends_with(&format!("-gpu-{name}.{suffix}")), "{found}");
    }
    let document = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    (document, std::fs::read_to_string(markdown).unwrap())
}

fn table_of<'a>(parts: &'a [Value], name: &str) -> &'a Value {
    let mut tables = parts.iter().flat_map(|part| part["tables"].as_array().unwrap());
    tables
        .find(|table| table["name"] == name)
        .unwrap_or_else(|| panic!("there is no table {name}"))
}

fn output_text(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}
