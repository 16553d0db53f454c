#!/bin/sh
# Slurm sets no PATH here.
exec /usr/bin/gpushctl slurm prolog
