//! Objects that several processes use. The kernel knows an object by a handle within an open file,
//! in every process that has the file. [`context`] hands the file over, an [`envelope`] carries a
//! handle and the facts to check it, and the other files import one kind of object each.
//!
//! Pairs with `ibv_import_device`, `ibv_import_pd`, `ibv_import_mr`, `ibv_import_dm` and
//! `mlx5dv_var_import`, `mlx5dv_devx_obj_import` and `mlx5dv_devx_umem_import` of rdma-core; the kernel knows of none of them.

mod context;
pub(crate) mod devx;
mod dm;
pub(crate) mod envelope;
pub(crate) mod foreign;
pub(crate) mod imported;
pub(crate) mod mr;
pub(crate) mod passing;
mod pd;
pub(crate) mod var;
