//! Boxes of tensors, as the command line names them.

use tensor_relay_client::{Glob, Indices, Slice, TensorBox};

/// Parses `GLOB=rows:PART/PARTS`, `GLOB=columns:PART/PARTS`, or slices of each dimension as in `GLOB=0:128,:,64:96`.
pub(super) fn parse_box(text: &str) -> Result<TensorBox, String> {
    let usage = || {
        format!(
            "{text:?} is not GLOB=rows:PART/PARTS, GLOB=columns:PART/PARTS or GLOB=START:END,…, e.g. `**.q_proj.weight=rows:2/8`"
        )
    };
    let (tensors, slices) = text.rsplit_once('=').ok_or_else(usage)?;
    let slices = match slices.split_once(':') {
        Some(("rows", part)) => vec![(0, parse_part(part).ok_or_else(usage)?)],
        Some(("columns", part)) => vec![(1, parse_part(part).ok_or_else(usage)?)],
        _ => parse_slices(slices).ok_or_else(usage)?,
    };
    let tensors = Glob::new(tensors).map_err(|error| error.to_string())?;
    let slices = slices.into_iter().map(|(dimension, indices)| Slice { dimension, indices });
    Ok(TensorBox { tensors, slices: slices.collect() })
}

/// `PART/PARTS`, the part from 0.
fn parse_part(text: &str) -> Option<Indices> {
    let (part, parts) = text.split_once('/')?;
    let (part, parts) = (part.parse().ok()?, parts.parse().ok()?);
    (part < parts).then_some(Indices::Part { part, parts })
}

/// `START:END` for each dimension from the first; `:` for all of one.
fn parse_slices(text: &str) -> Option<Vec<(u32, Indices)>> {
    let parse = |(dimension, text): (u32, &str)| {
        let (start, end) = text.split_once(':')?;
        let start = if start.is_empty() { 0 } else { start.parse().ok()? };
        let end: u64 = end.parse().ok()?;
        Some((dimension, Indices::Range { start, length: end.checked_sub(start)? }))
    };
    (0..).zip(text.split(',')).filter(|(_, text)| *text != ":").map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_are_parts_or_ranges() {
        let part = |dimension, part, parts| Slice { dimension, indices: Indices::Part { part, parts } };
        let range = |dimension, start, length| Slice { dimension, indices: Indices::Range { start, length } };
        for (text, glob, slices) in [
            ("**.q_proj.weight=rows:2/8", "**.q_proj.weight", vec![part(0, 2, 8)]),
            ("a=b=columns:0/1", "a=b", vec![part(1, 0, 1)]),
            ("w=0:128,:,64:65", "w", vec![range(0, 0, 128), range(2, 64, 1)]),
            ("w=:5", "w", vec![range(0, 0, 5)]),
            ("w=:", "w", vec![]),
        ] {
            let parsed = parse_box(text).unwrap();
            assert_eq!((parsed.tensors.as_str(), parsed.slices), (glob, slices), "{text}");
        }
        for wrong in ["w", "w=rows:8/8", "w=rows:1", "=rows:1/8", "w=3:1", "w=1:2:3", "w=diagonals:1/2", "w="]
        {
            assert!(parse_box(wrong).is_err(), "{wrong}");
        }
    }
}
