//! Whoever destroys what another made vouches that the other is done with it.
#![allow(unused)]

use uverbs::ForeignObject;

fn destroy(object: ForeignObject) -> bool {
    { object.destroy().is_ok() }
}

fn main() {
    let _ = destroy;
}
