//! Caches of inference engines: sent with files, and unpacked beside them.

use crate::errors::Kind;
use pyo3::prelude::*;
use std::{collections::BTreeMap, ffi::CString, path::PathBuf};
use tensor_relay_cli::{PYTHON_PROGRAM, fact_doubts, machine_facts, parse_engine_cache};
use tensor_relay_client::{EngineCache, Facts, unpack_engine_cache};

/// The caches of `texts`, and the facts that they depend on: of the machine, of this interpreter, and the `given` ones.
///
/// # Errors
/// `RequestError` for a wrong text.
pub(crate) fn of(
    py: Python<'_>,
    texts: Option<Vec<String>>,
    given: Option<BTreeMap<String, String>>,
) -> PyResult<(Vec<EngineCache>, Facts)> {
    let texts = texts.unwrap_or_default();
    let caches: Result<Vec<_>, _> = texts.iter().map(|text| parse_engine_cache(text)).collect();
    let caches = caches.map_err(Kind::Request.because(py))?;
    if caches.is_empty() {
        return Ok((caches, Facts::default()));
    }
    let mut facts = py.detach(machine_facts);
    let program = CString::new(PYTHON_PROGRAM)?;
    let program = PyModule::from_code(py, &program, c"engine_facts.py", c"tensor_relay._engine_facts")?;
    facts.extend(program.getattr("facts")?.call0()?.extract::<BTreeMap<String, String>>()?);
    facts.extend(given.unwrap_or_default());
    for doubt in fact_doubts(&facts) {
        tracing::warn!("The facts for engine caches may be wrong: {doubt}.");
    }
    Ok((caches, facts))
}

/// Unpacks caches of inference engines that came with the version that `pull` or `Snapshot.save_files` wrote to
/// `folder`, to where the engines look. Call it before an engine starts. Returns, by name, None for a cache that was
/// unpacked, or why it was not: the version has none, or the machine differs in a fact, which is named with both
/// values.
///
/// caches: `vllm`, `inductor` or `triton`, or `NAME=FOLDER` for any. They contain code that the engine will run:
///     name them only if you trust the publisher with that.
/// facts: what this machine is, instead of what is found out: `gpu`, `driver`, `torch` and so on. The value `*`
///     agrees with every cache.
///
/// Files that exist are not replaced. Raises RequestError for a cache without a known folder.
#[pyfunction]
#[pyo3(signature = (folder, caches, *, facts = None))]
pub(crate) fn unpack_engine_caches(
    py: Python<'_>,
    folder: PathBuf,
    caches: Vec<String>,
    facts: Option<BTreeMap<String, String>>,
) -> PyResult<BTreeMap<String, Option<String>>> {
    let (caches, facts) = of(py, Some(caches), facts)?;
    let unpack = |cache: &EngineCache| {
        let unpacked = unpack_engine_cache(&folder, cache, &facts);
        (cache.name.to_string(), unpacked.err().map(|error| error.to_string()))
    };
    Ok(py.detach(|| caches.iter().map(unpack).collect()))
}
