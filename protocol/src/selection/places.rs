//! The places of boxes in a receiver's memory.

use super::Selection;
use crate::PAYLOAD_ALIGNMENT;
use std::{collections::HashMap, ops::Range};

/// The memory of a selection with boxes: what is selected of each tensor is dense, aligned, and in the order of the
/// payload. Tensors that share their bytes, and of which the same is selected, share their place.
#[derive(Debug)]
pub(super) struct Places {
    by_tensor: HashMap<u32, Range<u64>>,
    bytes: u64,
}

impl Places {
    pub(super) fn of(selection: &Selection) -> Self {
        let tensors = selection.manifest.tensors();
        let mut indexes: Vec<u32> = selection.tensors.iter().collect();
        indexes.sort_by_key(|index| tensors[*index as usize].offset());
        let (mut places, mut shared) = (Self { by_tensor: HashMap::new(), bytes: 0 }, HashMap::new());
        for index in indexes {
            let tensor = &tensors[index as usize];
            let bytes = selection.tensor(index as usize).byte_len();
            let key = (tensor.offset(), selection.bounds(index as usize));
            let place = match bytes {
                0 => 0..0,
                _ => shared.entry(key).or_insert_with(|| places.add(bytes)).clone(),
            };
            places.by_tensor.insert(index, place);
        }
        places
    }

    fn add(&mut self, bytes: u64) -> Range<u64> {
        let place = self.bytes..self.bytes + bytes;
        self.bytes = place.end.next_multiple_of(PAYLOAD_ALIGNMENT);
        place
    }

    /// The place of the selected tensor with this index.
    pub(super) fn tensor(&self, index: u32) -> Option<Range<u64>> {
        self.by_tensor.get(&index).cloned()
    }

    /// The size of the memory.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}
