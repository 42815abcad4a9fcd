//! DMA by mkey: reads and writes guest memory and device memory.
//!
//! Pairs with [`crate::object::mkey`], which checks an access and finds its addresses.

use crate::device::Device;
use crate::object::mkey::{Access, Piece, Place};

impl Device {
    fn read_piece(&self, piece: Piece, to: &mut [u8]) -> Result<(), String> {
        match piece.place {
            Place::Guest(address) => {
                self.memory.read(address, to).map_err(|fault| format!("{fault:?}"))
            }
            Place::Bar(offset) => {
                self.bar.read(offset, to);
                Ok(())
            }
        }
    }

    fn write_piece(&self, piece: Piece, from: &[u8]) -> Result<(), String> {
        match piece.place {
            Place::Guest(address) => {
                self.memory.write(address, from).map_err(|fault| format!("{fault:?}"))
            }
            Place::Bar(offset) if self.bar.write(offset, from) => Ok(()),
            Place::Bar(offset) => Err(format!("no device memory at {offset:#x}")),
        }
    }

    /// Reads the memory of an access.
    pub(crate) fn read_pieces(&self, access: Access) -> Result<Vec<u8>, String> {
        let pieces = self.objects.resolve(access)?;
        self.objects.cost.add_bytes(access.len);
        let mut data = vec![0; access.len as usize];
        let mut at = 0;
        for piece in pieces {
            self.read_piece(piece, &mut data[at..at + piece.len])?;
            at += piece.len;
        }
        Ok(data)
    }

    /// Writes the memory of an access.
    pub(crate) fn write_pieces(&self, access: Access, data: &[u8]) -> Result<(), String> {
        let pieces = self.objects.resolve(access)?;
        self.objects.cost.add_bytes(access.len);
        let mut at = 0;
        for piece in pieces {
            self.write_piece(piece, &data[at..at + piece.len])?;
            at += piece.len;
        }
        Ok(())
    }

    /// Replaces the word of an access, 4 or 8 bytes, atomically, and returns the old value. Memory
    /// holds numbers in the guest's byte order, little endian.
    pub(crate) fn update_word(
        &self,
        access: Access,
        mut change: impl FnMut(u64) -> u64,
    ) -> Result<u64, String> {
        let len = access.len as usize;
        let pieces = self.objects.resolve(access)?;
        let [piece] = pieces[..] else { return Err(format!("a word in {} pieces", pieces.len())) };
        let native =
            |value: u64| if len == 8 { value.to_le() } else { u64::from((value as u32).to_le()) };
        let swapped = |old: u64| native(change(native(old)));
        let old = match piece.place {
            Place::Guest(address) => {
                self.memory.update(address, len, swapped).map_err(|fault| format!("{fault:?}"))
            }
            Place::Bar(offset) => self
                .bar
                .shared(offset, len)
                .and_then(|memory| memory.update(offset as usize, len, swapped))
                .ok_or_else(|| format!("no word of device memory at {offset:#x}")),
        };
        old.map(native)
    }
}
