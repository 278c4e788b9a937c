"""The shipped families, one file each; `dataproto.vlm.family_of` imports a file when one of its model types is first used."""
